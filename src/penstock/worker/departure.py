"""A worker that moves to another process leaves where it is: at the end of an epoch, with a commit."""

from __future__ import annotations

import math


class Departure:
    """When a worker is to leave, and whether it has."""

    def __init__(self) -> None:
        self.left = False
        """All that comes now is held, for another to do, or for itself where it stays."""
        self._requested: tuple[int, int] | None = None
        """⟨Commit, epoch⟩: when that epoch ends the worker snapshots its state for that commit, and does nothing
        more."""
        self._postponed = False
        """The bolts were to be snapshotted for the commit with which it leaves."""
        self._with = 0
        """The commit it left with at last."""

    def request(self, commit: int, epoch: int) -> None:
        self._requested = commit, epoch

    @property
    def requested(self) -> bool:
        return self._requested is not None

    @property
    def last_epoch(self) -> float:
        """The last one the worker does anything for."""
        return math.inf if self._requested is None else self._requested[1]

    def commit_at(self, epoch: int) -> int | None:
        """The commit it leaves with at the end of this epoch; None: it stays."""
        return self._requested[0] if self._requested is not None and self._requested[1] == epoch else None

    def postpones(self, commit: int) -> bool:
        """The bolts are to be snapshotted for this commit: whether that is done when the worker leaves, and not
        now. It is remembered, for ``cancel``."""
        if self._requested is None:
            return commit == self._with
        self._postponed = self._postponed or commit == self._requested[0]
        return commit in (self._requested[0], self._with)

    def finish(self) -> None:
        """Its state is snapshotted."""
        assert self._requested is not None
        self._with, self._requested, self._postponed, self.left = self._requested[0], None, False, True

    def cancel(self) -> int | None:
        """It is not to leave after all. The commit for which the bolts are still to be snapshotted, if there is
        one."""
        commit = self._requested[0] if self._requested is not None and self._postponed else None
        self._requested, self._postponed, self.left = None, False, False
        return commit
