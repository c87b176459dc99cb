"""The executor of spouts: it calls the spout while it may emit, and acks or fails its messages."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from penstock.acking import ledger
from penstock.acking.lineage import I64
from penstock.acking.pending import MessageIdArray, Pending
from penstock.acking.spread import owners
from penstock.control.hold_timer import HoldTimer
from penstock.control.pace import Pace
from penstock.metrics.stats import bounded_count
from penstock.protocol.commands import RootsSettled
from penstock.texts import encodable
from penstock.topology.components import BaseSpout, BatchSpout, Component, Conf, Failure, Spout
from penstock.worker.arrow_collectors import SpoutArrowCollector
from penstock.worker.collectors import SpoutTupleCollector
from penstock.worker.executor import Executor
from penstock.worker.failures import USER_ERRORS, blame

SAVED = 0.005
"""Seconds of a user's rate limit that a spout saves up before it emits: at 20,000 tuples per second, calls for one
tuple after the other would take a whole core."""
UNLIMITED = 1 << 30
"""Tuples: more than a spout can emit in one run."""


class SpoutExecutor(Executor[BaseSpout]):
    """Runs a spout: calls ``next_tuple`` or ``next_batch`` while it is active and, with at-least-once delivery,
    while fewer than ``max_pending`` of its tuples are in flight. Used by the worker's loop only."""

    def __init__(
        self, *args: Any, pending: Pending | None = None, max_pending: int = 0, pace: Pace | None = None
    ) -> None:
        super().__init__(*args)
        self.pace = pace or Pace()
        """The rate that the user allows."""
        self.active = False
        self.pending = pending
        self._max_pending = max_pending
        self.burst = UNLIMITED
        """The most tuples that it may emit in one run. The worker adjusts it to the bolts that share it."""
        self.last_emitted = 0
        """The tuples that it emitted in the last run."""
        self._largest = 1
        """The most tuples that one call has emitted without asking for ``room``, or beyond what that returned."""
        self._permitted = 0
        """Tuples that the rate limit and ``max_pending`` permit now, whatever the send queues hold."""
        self._calls = 0
        """Calls of the spout in the current run."""
        self._counts_column = isinstance(self.component, Spout) and len(self._buffers) == 1
        self._held_back = self._holds_timeouts = False
        self._hold_timer = HoldTimer()
        self._done: list[Any] = []
        self._uncommitted: deque[tuple[int, list[Any]]] = deque()
        self._next: Callable[[], None]
        self._batches: SpoutArrowCollector | None = None
        spout = type(self.component)
        self._has_ack = spout.ack is not BaseSpout.ack or spout.ack_many is not BaseSpout.ack_many

    def open(self, conf: Conf) -> None:
        spout = self.component
        if isinstance(spout, Spout):
            tuples = SpoutTupleCollector(self.context.component, self.outputs)
            self._next, self._done = spout.next_tuple, tuples.done
            self._guard("open", spout.open, conf, self.context, tuples)
        else:
            assert isinstance(spout, BatchSpout)
            self._batches = batches = SpoutArrowCollector(self.context.component, self.outputs)
            self._next, self._done = spout.next_batch, batches.done
            self._guard("open", spout.open, conf, self.context, batches)

    def lag(self) -> dict[str, int]:
        """The lag of each partition, as the spout reports it, in a form that can be sent. Empty if ``lag`` raises:
        a number that is only displayed must not prevent a report."""
        try:
            lag = self.component.lag().items()
            return {encodable(str(partition)): bounded_count(records) for partition, records in lag}
        except USER_ERRORS:  # user code may raise anything
            return {}

    def activate(self) -> None:
        if not self.active:
            self._guard("activate", self.component.activate)
            self.active = True

    def deactivate(self) -> None:
        if self.active:
            self._guard("deactivate", self.component.deactivate)
            self.active = False
            self._note_hold(self._clock.monotonic(), held=False)

    def update_room(self) -> int:
        """Return the number of tuples that the spout may emit now.

        One call may emit many tuples, so it is made only if as many as the largest call so far would fit, or if
        no tuple is in flight. After a spout was held back, it continues when a fifth of ``max_pending`` is free,
        because a few large frames cost less than many small ones.

        The worker calls this at least once a turn, so it also measures the time for which flow control holds the
        spout back. Time due to the user's rate limit or to deactivation is not counted."""
        if not self.active or (self.dead_letters is not None and self.dead_letters.waits):
            return 0
        now = self._clock.monotonic()
        paced = self.pace.room(now)
        free = min(self.send_queues.room() - self.waiting(), paced, self.burst)
        if free <= 0:
            self._note_hold(now, held=paced > 0)
            return 0
        self._permitted = math.ceil(min(paced, UNLIMITED))
        if self.pending is None:
            self._note_hold(now, held=False)
            return math.ceil(free)
        in_flight = self.pending.count + self.waiting()
        room = min(self._max_pending - in_flight, self.pending.room)
        self._permitted = min(self._permitted, room)
        wanted = max(self._largest, self._max_pending // 5) if self._held_back else self._largest
        self._held_back = room < wanted and in_flight > 0
        self._note_hold(now, self._held_back)
        return 0 if self._held_back else min(room, math.ceil(free))

    def _note_hold(self, now: float, held: bool) -> None:
        self._hold_timer.update(now, held)
        self.stats.held_back = self._hold_timer.seconds

    def wait(self) -> float:
        """Seconds until a rate limit allows more tuples; infinity if the spout does not wait for one."""
        if not self.active:
            return math.inf
        now = self._clock.monotonic()
        waits = [wait for wait in (self.pace.wait(now), self.send_queues.wait()) if wait > 0]
        return min(waits, default=math.inf)

    def run(self) -> bool:
        self.last_emitted = 0
        room = self.update_room()
        if room <= 0 or not self._store_dead_letters_if_full():
            return False
        before = self.waiting()
        born = self._clock.now()
        self._calls = 0
        self.timer.start()
        try:
            if self._counts_column:
                self._call_spout(room)
            else:
                self._call_spout_of_streams(room)
        except USER_ERRORS as error:  # user code may raise anything
            self.report(blame(self.context.component, self._next.__name__, error))
        calls = max(self._calls, 1)
        self._learn(calls, self.timer.stop(calls))
        emitted = self.last_emitted = self.waiting() - before
        if emitted:
            self._note_birth(born)
            self.pace.spend(emitted)
            self.stats.executed += emitted
            self._hold_timer.on_sent()
        else:
            self._hold_timer.on_idle()
        self.stats.held_back = self._hold_timer.seconds
        if self._done and self.context.delivery == "at_most_once":
            self._ack(self._take_done())  # a message is acked when it is sent, as in Storm without ackers
        return emitted > 0

    def _call_spout(self, room: int) -> None:
        """Call a tuple spout of one stream until it emits nothing, the next call may exceed ``room``, or the time
        for one run is used up. The number of rows is asked for after each call: of a list, which takes a fifth of
        the time that ``waiting`` takes."""
        next_tuple, largest, column = self._next, self._largest, self._buffers[0].columns[0]
        rows = len(column)
        last = rows + room - largest
        calls = 0
        try:
            for calls in range(1, self._calls_per_run + 1):  # noqa: B007 - used below
                next_tuple()
                after = len(column)
                if after == rows:
                    break
                if after - rows > largest:
                    last -= after - rows - largest
                    largest = after - rows
                rows = after
                if rows > last:
                    break
        finally:
            self._calls, self._largest = calls, largest

    def _call_spout_of_streams(self, room: int) -> None:
        """As ``_call_spout``, for spouts of several streams and batch spouts."""
        next_tuple, waiting, batches = self._next, self.waiting, self._batches
        rows = waiting()
        end = rows + room
        if batches is not None:
            batches.limit = rows + self._permitted
        while self._calls < self._calls_per_run:
            self._calls += 1
            if batches is not None:
                batches.granted = None
            next_tuple()
            after = waiting()
            if after == rows:
                break
            if batches is None or batches.granted is None or after - rows > batches.granted:
                self._largest = max(self._largest, after - rows)
            rows = after
            if rows + self._largest > end:
                break

    def close(self) -> None:
        self._guard("close", self.component.close)

    # ---- at least once ---------------------------------------------------------------------------------

    def settle(self, command: RootsSettled) -> None:
        """Handle the acker's message that roots are complete, or have failed."""
        assert self.pending is not None
        first, length = np.frombuffer(command.data, np.int64).reshape(2, -1)
        numbers = ledger.numbers(first, length)
        if command.error:
            self.on_failed(numbers, command.component, command.error)
        else:
            self.on_complete(numbers)

    def on_complete(self, numbers: I64) -> None:
        """Called with the numbers of roots that are complete."""
        assert self.pending is not None
        ids, born = self.pending.resolve(numbers)
        self.stats.latency.record_many(self._clock.monotonic() - born)
        self._ack(ids)

    def on_failed(self, numbers: Sequence[int] | I64, component: str, error: str, handed_on: bool = False) -> None:
        """Called with the numbers of roots that have failed in a component. ``handed_on``: as in ``Failure``."""
        assert self.pending is not None
        ids, _ = self.pending.resolve(np.asarray(numbers))
        self._fail(ids, Failure(component, error, handed_on=handed_on))

    @property
    def settled(self) -> bool:
        """False while failed tuples are not yet safe in the spout's own queue. True also if the spout cannot
        tell."""
        try:
            return bool(self.component.settled())
        except USER_ERRORS:  # user code may raise anything; the position in the state is still behind the tuples
            return True

    def hold_timeouts(self, held: bool) -> None:
        """While ``held``, no message times out. When the hold ends, the timeout of every pending message starts
        again."""
        if self._holds_timeouts and not held and self.pending is not None:
            self.pending.restart(self._clock.monotonic())
        self._holds_timeouts = held

    def hand_on(self) -> int:
        """Fail all messages that are not acked yet, so that the next form of the topology reads them again. They
        do not count as failed. Returns how many messages are left, because the spout would forget them: it keeps
        neither its position nor what is under way in its state."""
        if self.pending is None:
            return 0
        saves = type(self.component).before_snapshot is not Component.before_snapshot
        if not saves and not self.context.state:
            return self.pending.count
        failure = Failure("", "the topology was replaced before the tuple was processed", handed_on=True)
        self._fail(self.pending.take_all(), failure)
        return 0

    def expire(self) -> None:
        """Fail the messages whose timeout has passed."""
        if self.pending is None or self._holds_timeouts:
            return
        at, now = self.pending.next_expiry(), self._clock.monotonic()
        if at is not None and at <= now:
            late = self.pending.expire(now)
            self.stats.timed_out += len(late)
            self._fail(late, Failure("", "not acked in time (setting delivery.message_timeout)"))

    # ---- exactly once ----------------------------------------------------------------------------------

    def on_epoch_end(self, epoch: int) -> None:
        if self._done:
            self._uncommitted.append((epoch, self._take_done()))

    def on_committed(self, epoch: int) -> None:
        while self._uncommitted and self._uncommitted[0][0] <= epoch:
            self._ack(self._uncommitted.popleft()[1])
        super().on_committed(epoch)

    # ---- calls of the spout's ack and fail ---------------------------------------------------------------

    def _take_done(self) -> list[Any]:
        done = self._done[:]
        self._done.clear()
        return done

    def _ack(self, ids: MessageIdArray) -> None:
        self.stats.acked += len(ids)
        if not self._has_ack or not len(ids):
            return
        spout = self.component
        if type(spout).ack_many is not BaseSpout.ack_many:
            self._notify("ack_many", spout.ack_many, ids)
        else:
            for msg_id in _each(ids):
                self._notify("ack", spout.ack, msg_id)

    def _fail(self, ids: MessageIdArray, failure: Failure) -> None:
        if not failure.handed_on:
            self.stats.failed += len(ids)
        spout = self.component
        if len(ids) and type(spout).fail_many is not BaseSpout.fail_many:
            self._notify("fail_many", spout.fail_many, ids, failure)
            return
        for msg_id in _each(ids):
            self._notify("fail", spout.fail, msg_id, failure)

    def _notify(self, call: str, function: Callable[..., None], *args: Any) -> None:
        try:
            function(*args)
        except USER_ERRORS as error:  # user code may raise anything; continue with the next message
            self.report(blame(self.context.component, call, error))


def _each(ids: MessageIdArray) -> list[Any]:
    return ids.tolist() if isinstance(ids, np.ndarray) else ids


def settle(spouts: Iterable[SpoutExecutor], command: RootsSettled) -> None:
    """Hand the acker's message to the spout task whose roots it is about."""
    for spout in spouts:
        if spout.context.task == command.task:
            spout.settle(command)


def fail_roots_of(spouts: Iterable[SpoutExecutor], acker: int, count: int) -> None:
    """Fail the open roots that belong to this of ``count`` ackers, because its ledgers are lost."""
    for spout in spouts:
        if spout.pending is not None:
            numbers = spout.pending.numbers()
            lost = numbers[owners(spout.context.task, numbers, count) == acker]
            spout.on_failed(lost, "", "its acker was lost", handed_on=True)
