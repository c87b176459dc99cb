"""The unit in which tuples wait for a task."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

from penstock.acking.flights import Trace
from penstock.acking.lineage import Lineage
from penstock.columns import ColumnBatch
from penstock.frames.header import UNNUMBERED, Header


@dataclass(slots=True)
class Parcel:
    """Tuples that wait for a task: a frame from another worker, or a batch from a task of the same worker."""

    header: Header
    content: pa.Buffer | pa.RecordBatch | ColumnBatch
    lineage: Lineage | Trace | None = None
    """The roots of the tuples, if acks are tracked and the batch comes from the same worker. A frame contains
    its lineage."""
    sources: tuple[tuple[int, int], ...] = ()
    """If the tuples come from several tasks of the same worker: each task and its number of tuples, in order. The
    header names the first task."""

    @property
    def frame(self) -> pa.Buffer:
        """The frame. Only for a parcel from another worker."""
        assert isinstance(self.content, pa.Buffer)
        return self.content

    @property
    def from_inside(self) -> bool:
        """True if the tuples come from the same worker. They have no frame number."""
        return not isinstance(self.content, pa.Buffer)

    @property
    def is_numbered(self) -> bool:
        """True if the receiver checks the frame's number: it comes from another worker of this query run."""
        return isinstance(self.content, pa.Buffer) and self.header.sequence != UNNUMBERED

    @property
    def bytes(self) -> int:
        return int(self.content.size if isinstance(self.content, pa.Buffer) else self.content.nbytes)
