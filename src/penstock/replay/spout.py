"""A spout over any Eden: what fails comes back before fresh data, a bounded number of times (SPEC 2.5)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.clock import Clock, SystemClock
from penstock.errors import FieldCountError, FieldTypeError, SettingError
from penstock.replay.decisions import ReplayEntry
from penstock.replay.eden import Eden
from penstock.replay.queues import QueuesBusy, ReplayStore
from penstock.replay.replayer import Replayer, claim
from penstock.topology.components import BatchSpout, BatchSpoutCollector, Conf, Context, Failure
from penstock.topology.streams import OutputDeclarer

_BATCH = 2048  # tuples emitted at a time: half of what is read ahead, so reading and emitting overlap
_HANDOVER = 30.0  # s another process of this task may take to let go of the queues; as the message timeout


class ReplaySpout(BatchSpout):
    """Emits what its source holds, at least once; each task has From, To and dead letters of its own.

    A tuple that fails or times out is emitted again before fresh ones; after ``max_attempts`` failures it goes to
    the dead letters, which ``penstock dlq`` shows. The queues are opened at the first ``next_batch`` after
    ``activate`` and let go when, deactivated, the last tuple on its way is acked or stored: so a topology that
    takes over from another finds all that the other left.

    How far Eden and the queues are done with is part of the task's state: a restart reads on where the last
    committed epoch was, and a savepoint takes Eden back to where it was then. What failed stays in the queues
    until it is done with, also when the topology is started afresh: failures of an earlier run are still owed.
    What was done with in them is gone for good: a savepoint does not bring it back.
    """

    def __init__(self, source: Eden, *, max_attempts: int = 5, store: ReplayStore | None = None) -> None:
        """``store`` is where the queues are kept; without it the source says: Kafka for a Kafka topic, else the
        task's folder on local disk."""
        if max_attempts < 1:
            raise SettingError(
                "ReplaySpout(max_attempts)",
                f"a tuple needs at least one attempt, not {max_attempts!r}",
                "With 1, a failed tuple becomes a dead letter at once.",
            )
        self._source, self._max_attempts = source, max_attempts
        self._store = store or source.store()
        self._clock: Clock = SystemClock()
        self._replayer: Replayer | None = None
        self._pending: dict[int, ReplayEntry] = {}
        self._next_id = 0
        self._active = False
        self._waiting_since = 0.0

    def declare_output_fields(self, declarer: OutputDeclarer) -> None:
        declarer.declare(*self._source.fields)

    def open(self, conf: Conf, context: Context, collector: BatchSpoutCollector) -> None:
        if context.delivery != "at_least_once":
            raise SettingError(
                f"component '{context.component}', ReplaySpout",
                "replay needs delivery=at_least_once, where tuples are acked and failed, and it "
                f"is {context.delivery}",
                "Set delivery=at_least_once, or use the source's own spout.",
            )
        self._store.check(context)
        claim(context.state)  # here, not when the queues are opened: a task with state has epochs
        self._conf, self._context, self._collector = conf, context, collector

    def activate(self) -> None:
        self._active = True
        self._waiting_since = self._clock.monotonic()

    def deactivate(self) -> None:
        self._active = False
        self._release_if_idle()

    def next_batch(self) -> None:
        if self._replayer is None and not self._try_open():
            return
        assert self._replayer is not None
        if given_up := self._replayer.take_given_up():
            self._context.gave_up(given_up)
        entries = self._replayer.take(_BATCH)
        if not entries:
            return
        try:
            self._emit(entries)
        except (FieldTypeError, FieldCountError):  # a value that does not fit its field: the others are emitted
            for entry in entries:
                try:
                    self._emit([entry])
                except (FieldTypeError, FieldCountError) as fault:
                    self._replayer.refuse(entry, f"cannot be emitted: {fault}")
                    self._context.report(fault)

    def _emit(self, entries: list[ReplayEntry]) -> None:
        """All of them, or none."""
        ids = range(self._next_id, self._next_id + len(entries))
        columns = list(zip(*[entry.record.payload for entry in entries], strict=True))
        self._collector.emit_batch(columns, msg_ids=ids)
        self._next_id = ids.stop
        self._pending.update(zip(ids, entries, strict=True))

    def ack(self, msg_id: Any) -> None:
        self.ack_many((msg_id,))

    def ack_many(self, msg_ids: Sequence[Any]) -> None:
        found = [entry for id in msg_ids if (entry := self._pending.pop(id, None)) is not None]
        if found and self._replayer is not None:
            self._replayer.ack(found)
        self._release_if_idle()

    def fail(self, msg_id: Any, failure: Failure) -> None:
        entry = self._pending.pop(msg_id, None)
        if entry is not None and self._replayer is not None:
            self._replayer.fail(entry, failure)
        self._release_if_idle()

    def before_snapshot(self) -> None:
        if self._replayer is not None:
            self._replayer.note()

    def after_commit(self) -> None:
        if self._replayer is not None:
            self._replayer.on_committed()

    def lag(self) -> Mapping[str, int]:
        return self._source.lag() if self._replayer is not None else {}

    def close(self) -> None:
        if self._replayer is not None:
            replayer, self._replayer = self._replayer, None
            self._pending.clear()
            replayer.close()

    def _try_open(self) -> bool:
        """Open the queues; False while another process of this task still holds them."""
        try:
            queues = self._store.open(self._context)
        except QueuesBusy:
            if self._clock.monotonic() - self._waiting_since > _HANDOVER:
                raise
            return False
        self._source.open(self._conf, self._context)
        self._replayer = Replayer(
            self._source,
            queues,
            state=self._context.state,
            max_attempts=self._max_attempts,
            clock=self._clock,
            report=self._context.report,
        )
        self._replayer.start()
        return True

    def _release_if_idle(self) -> None:
        if not self._active and not self._pending:
            self.close()
