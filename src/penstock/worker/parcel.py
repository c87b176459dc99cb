"""The unit in which tuples wait for a task."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

from penstock.acking.lineage import Lineage
from penstock.frames.header import Header


@dataclass(slots=True)
class Parcel:
    """Tuples that wait for a task: a frame from another worker, or a batch from a task of the same worker."""

    header: Header
    content: pa.Buffer | pa.RecordBatch
    lineage: Lineage | None = None
    """The roots of the tuples, if acks are tracked and the batch comes from the same worker. A frame contains
    its lineage."""

    @property
    def bytes(self) -> int:
        return int(self.content.size if isinstance(self.content, pa.Buffer) else self.content.nbytes)
