"""Decides when a worker that moves to another slot stops in its old slot: at the end of an epoch, with the
snapshot of a commit."""

from __future__ import annotations

import math


class Departure:
    """Whether and when a worker is to leave its slot. Used by the worker's loop only."""

    def __init__(self) -> None:
        self.left = False
        """The worker has stopped. Its input is buffered, in case the move is cancelled."""
        self._requested: tuple[int, int] | None = None
        """⟨Commit, epoch⟩: when that epoch ends, the worker takes the snapshot for that commit and stops."""
        self._postponed = False
        """The driver has asked for the bolts' snapshot of the commit with which the worker leaves."""
        self._left_with = 0
        """The commit with which the worker left most recently; 0 if it never left."""

    def request(self, commit: int, epoch: int) -> None:
        """Leave at the end of ``epoch``, with the snapshot of ``commit``."""
        self._requested = commit, epoch

    @property
    def requested(self) -> bool:
        return self._requested is not None

    @property
    def last_epoch(self) -> float:
        """The last epoch that the worker processes; infinity if it is not to leave."""
        return math.inf if self._requested is None else self._requested[1]

    def commit_at(self, epoch: int) -> int | None:
        """The commit with which the worker leaves at the end of this epoch; None if it does not leave then."""
        return self._requested[0] if self._requested is not None and self._requested[1] == epoch else None

    def postpones(self, commit: int) -> bool:
        """Called when the driver asks for the bolts' snapshot of ``commit``. Returns True if the worker takes
        that snapshot when it leaves instead of now; ``cancel`` then returns the commit."""
        if self._requested is None:
            return commit == self._left_with
        self._postponed = self._postponed or commit == self._requested[0]
        return commit in (self._requested[0], self._left_with)

    def finish(self) -> None:
        """Record that the worker has taken its snapshot and has left."""
        assert self._requested is not None
        self._left_with, self._requested, self._postponed, self.left = self._requested[0], None, False, True

    def cancel(self) -> int | None:
        """Withdraw the request to leave. Returns the commit whose snapshot of the bolts was postponed and is now
        due; None if there is none."""
        commit = self._requested[0] if self._requested is not None and self._postponed else None
        self._requested, self._postponed, self.left = None, False, False
        return commit
