"""A spout for any Eden: failed tuples are emitted again before fresh ones, a limited number of times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.clock import Clock, SystemClock
from penstock.errors import FieldCountError, FieldTypeError, PenstockError, SettingError, TopologyError
from penstock.replay.decisions import ReplayEntry
from penstock.replay.eden import Eden
from penstock.replay.places import as_places
from penstock.replay.queues import QueuesBusy, ReplayStore
from penstock.replay.replayer import Replayer
from penstock.replay.sources import position_values
from penstock.topology.components import BatchSpout, BatchSpoutCollector, Conf, Context, Failure
from penstock.topology.streams import OutputDeclarer

_BATCH = 2048  # tuples emitted at a time: half of the tuples read ahead, so that reading and emitting overlap
_HANDOVER = 30.0  # seconds that another process of this task may take to close the queues; as the message timeout


class ReplaySpout(BatchSpout):
    """Emits the tuples of its source at least once (*Lu 2020*, section 4.2). Each task has its own From, To and
    dead letters.

    Nothing is kept of a tuple that was emitted but the place where it was read, which is its message id. A tuple
    that fails or times out is read again there, and emitted again before fresh ones. After ``max_attempts``
    failures it becomes a dead letter (``penstock dlq``), and also if it can no longer be read. The queues are
    opened by the first ``next_batch`` after ``activate``. They are closed when the spout is deactivated and its
    last tuple in flight is acked or stored, so a topology that takes over finds everything that its predecessor
    left.

    The positions of Eden and of the queues are part of the task's state. A restart resumes at the last committed
    epoch, and a savepoint restores the position of Eden. Failed tuples stay in the queues until they are
    processed, even if the topology is started from scratch. Processed tuples are removed from the queues; a
    savepoint does not restore them.
    """

    def __init__(self, source: Eden, *, max_attempts: int = 5, store: ReplayStore | None = None) -> None:
        """``store`` keeps the queues. By default the source determines it: Kafka for a Kafka topic, otherwise the
        task's folder on a local disk."""
        if not isinstance(source, Eden):
            raise TopologyError(
                "ReplaySpout",
                f"its source must be an Eden, not {source!r}",
                "Write ReplaySpout(FileEden('orders.txt')), for example.",
            )
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
        self._in_flight = 0
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
        position_values(context.state)  # not in _try_open: only a task that has state takes part in epochs
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
        entries = self._replayer.take(min(_BATCH, self._collector.room()))
        if not entries:
            return
        try:
            self._emit(entries)
        except (FieldTypeError, FieldCountError):  # a value does not fit its field: emit the other tuples
            for entry in entries:
                try:
                    self._emit([entry])
                except (FieldTypeError, FieldCountError) as fault:
                    self._replayer.refuse(entry, f"cannot be emitted: {fault}")
                    self._context.report(fault)

    def _emit(self, entries: list[ReplayEntry]) -> None:
        """Emit all of the entries, or raise and emit none."""
        places, records = zip(*entries, strict=True)
        columns = list(zip(*[record.payload for record in records], strict=True))
        ids: Any = as_places(places)
        self._collector.emit_batch(columns, msg_ids=ids)
        self._in_flight += len(entries)

    def ack(self, msg_id: Any) -> None:
        self.ack_many((msg_id,))

    def ack_many(self, msg_ids: Sequence[Any]) -> None:
        self._in_flight -= len(msg_ids)
        if self._replayer is not None:
            self._replayer.ack(msg_ids)
        self._release_if_idle()

    def fail(self, msg_id: Any, failure: Failure) -> None:
        self.fail_many((msg_id,), failure)

    def fail_many(self, msg_ids: Sequence[Any], failure: Failure) -> None:
        self._in_flight -= len(msg_ids)
        if self._replayer is not None:
            self._replayer.fail(msg_ids, failure)
        self._release_if_idle()

    def settled(self) -> bool:
        """Also closes the queues of a deactivated spout: nothing else is called after its last failed tuple is
        stored."""
        settled = self._replayer is None or self._replayer.settled
        try:
            self._release_if_idle()
        except (OSError, PenstockError) as error:
            self._context.report(error)
        return settled

    def before_snapshot(self) -> None:
        if self._replayer is not None:
            self._replayer.save_positions()

    def after_commit(self) -> None:
        if self._replayer is not None:
            self._replayer.on_committed()

    def lag(self) -> Mapping[str, int]:
        return self._source.lag() if self._replayer is not None else {}

    def close(self) -> None:
        if self._replayer is not None:
            replayer, self._replayer = self._replayer, None
            self._in_flight = 0
            replayer.close()

    def _try_open(self) -> bool:
        """Open the queues. Returns False while another process of this task has them open."""
        try:
            queues = self._store.open(self._context)
        except QueuesBusy:
            if self._clock.monotonic() - self._waiting_since > _HANDOVER:
                raise
            return False
        try:
            self._source.open(self._conf, self._context)
        except BaseException:
            queues.close()  # the next call opens them again
            raise
        self._replayer = Replayer(
            self._source,
            queues,
            state=self._context.state,
            max_attempts=self._max_attempts,
            clock=self._clock,
            report=self._context.report,
            wake=self._context.wake,
        )
        self._replayer.start()
        return True

    def _release_if_idle(self) -> None:
        """Close the queues if nothing is in flight. Waits for no disk: what failed last must be stored already."""
        if not self._active and not self._in_flight and self._replayer is not None and self._replayer.settled:
            self.close()
