"""One pass over the tasks of a worker: from a spout, or from the most downstream bolt that has input, to the last
bolt that is fused with it. What a component emits to receivers in the same worker is passed on as soon as its
tasks have run, so inside a worker no tuple waits for a timer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from penstock.worker.bolts import BoltExecutor
from penstock.worker.spouts import UNLIMITED, SpoutExecutor

PASS_TIME = 0.004
"""Seconds after which a pass ends, even if tuples still wait inside the worker: twice the time that one task works
at a stretch. Ticks, acks, commands and frames for other workers wait as long; the next pass continues where this
one ended."""

_LONGEST_PASS = 4 * PASS_TIME
"""Seconds of a pass after which a spout emits less, even if bolts had little to do."""
_FIRST_BURST = 256
"""Tuples that a spout may emit in the first pass."""

PassOn = Callable[[], None]
"""Passes the waiting tuples of one stream to their receivers in the same worker."""


class Level:
    """The tasks of one bolt in a worker."""

    def __init__(
        self, bolts: Sequence[BoltExecutor[Any]], streams: Sequence[PassOn], now: Callable[[], float]
    ) -> None:
        self._bolts, self._streams, self._now = bolts, streams, now
        self._next = 0
        """The task with which the next run begins, so that a busy task does not delay the others for long."""

    def run(self, deadline: float) -> bool:
        """Run the tasks until their inboxes are empty or the deadline has passed. Returns False if there was
        nothing to do."""
        worked, count, first = False, len(self._bolts), self._next
        for place in range(first, first + count):
            bolt = self._bolts[place % count]
            while bolt.run():
                worked = True
                if self._now() >= deadline:
                    self._next = (place + 1) % count
                    self.pass_on()
                    return True
        if worked:
            self.pass_on()
        return worked

    @property
    def busy(self) -> float:
        """Seconds in the code of the bolts so far."""
        return sum(bolt.stats.busy for bolt in self._bolts)

    def pass_on(self) -> None:
        """Pass what the tasks have emitted to the receivers in the same worker."""
        for stream in self._streams:
            stream()


class TaskPass:
    """The levels of a worker, upstream first. Used by the worker's loop only."""

    def __init__(
        self,
        spouts: Sequence[SpoutExecutor],
        spout_streams: Sequence[PassOn],
        levels: Sequence[Level],
        now: Callable[[], float],
    ) -> None:
        self._spouts, self._spout_streams, self._levels, self._now = spouts, spout_streams, levels, now
        if spout_streams:
            for spout in spouts:
                spout.burst = _FIRST_BURST

    def run_bolts(self) -> bool:
        """Begin with the most downstream bolt that can run, so that not more than one pass waits inside the
        worker. Returns False if no bolt could run."""
        deadline = self._now() + PASS_TIME
        for first in reversed(range(len(self._levels))):
            if self._levels[first].run(deadline):
                self._run_from(first + 1, deadline)
                return True
        return False

    def run_spouts(self) -> bool:
        """Run the spouts, and the bolts with what the spouts emitted. Returns whether a spout emitted."""
        begun = self._now()
        emitted = [spout.run() for spout in self._spouts]
        if not any(emitted):
            return False
        if self._spout_streams:
            for stream in self._spout_streams:
                stream()
            computed = self._busy()
            self._run_from(0, self._now() + PASS_TIME)
            self._adjust_bursts(self._now() - begun, self._busy() - computed)
        return True

    def pass_on(self) -> None:
        """Pass on what was emitted outside a pass, for example by ticks."""
        for stream in self._spout_streams:
            stream()
        for level in self._levels:
            level.pass_on()

    def _adjust_bursts(self, seconds: float, busy: float) -> None:
        """Let the spouts emit about as much as the bolts of this worker process in one pass. More would wait in
        inboxes: with a bolt that takes a millisecond for a tuple, a full inbox waits for a quarter of a minute.
        ``busy``: how much of the pass was spent in the code of bolts. If it is little, the pass is long because
        there are many tasks, and a smaller burst would not make it shorter."""
        long = seconds > PASS_TIME and (busy > PASS_TIME / 2 or seconds > _LONGEST_PASS)
        for spout in self._spouts:
            if long:
                spout.burst = max(1, min(spout.burst, spout.last_emitted) // 2)
            elif busy < PASS_TIME / 4 and spout.last_emitted * 2 > spout.burst:
                spout.burst = min(2 * spout.burst, UNLIMITED)

    def _busy(self) -> float:
        return sum(level.busy for level in self._levels)

    def _run_from(self, first: int, deadline: float) -> None:
        for level in self._levels[first:]:
            if self._now() >= deadline:
                return
            level.run(deadline)
