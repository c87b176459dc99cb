"""A slot that moves to another process leaves where it is: at the end of an epoch, with a commit."""

from __future__ import annotations

import math


class Departure:
    """When a slot is to leave, and whether it has."""

    def __init__(self) -> None:
        self.left = False
        """All that comes now is held, for another to do, or for itself where it stays."""
        self._wanted: tuple[int, int] | None = None
        """⟨Commit, epoch⟩: when that epoch ends the slot cuts its state for that commit, and does nothing more."""
        self._put_off = False
        """The bolts were to be cut for the commit with which it leaves."""
        self._with = 0
        """The commit it left with at last."""

    def want(self, commit: int, epoch: int) -> None:
        self._wanted = commit, epoch

    @property
    def wanted(self) -> bool:
        return self._wanted is not None

    @property
    def last_epoch(self) -> float:
        """The last one the slot does anything for."""
        return math.inf if self._wanted is None else self._wanted[1]

    def commit_at(self, epoch: int) -> int | None:
        """The commit it leaves with at the end of this epoch; None: it stays."""
        return self._wanted[0] if self._wanted is not None and self._wanted[1] == epoch else None

    def puts_off(self, commit: int) -> bool:
        """The bolts are to be cut for this commit: whether that is done when the slot leaves, and not now. It is
        remembered, for ``stay``."""
        if self._wanted is None:
            return commit == self._with
        self._put_off = self._put_off or commit == self._wanted[0]
        return commit in (self._wanted[0], self._with)

    def leave(self) -> None:
        """Its state is cut."""
        assert self._wanted is not None
        self._with, self._wanted, self._put_off, self.left = self._wanted[0], None, False, True

    def stay(self) -> int | None:
        """It is not to leave after all. The commit for which the bolts are still to be cut, if there is one."""
        commit = self._wanted[0] if self._wanted is not None and self._put_off else None
        self._wanted, self._put_off, self.left = None, False, False
        return commit
