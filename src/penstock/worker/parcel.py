"""Tuples on their way inside a worker."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

from penstock.acking.lineage import Lineage
from penstock.frames.header import Header


@dataclass(slots=True)
class Parcel:
    """Tuples that wait for a task: a frame from another worker, or a batch handed over within the worker."""

    header: Header
    content: pa.Buffer | pa.RecordBatch
    lineage: Lineage | None = None
    """What the tuples stem from, where acks are tracked and the batch comes from within the worker."""

    @property
    def bytes(self) -> int:
        return int(self.content.size if isinstance(self.content, pa.Buffer) else self.content.nbytes)
