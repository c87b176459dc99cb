"""The bolt that never waits for the database."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa

from penstock.errors import ComponentError, EnvironmentFault, SinkBusy, SinkRefused, TopologyError
from penstock.persist.embedded import EmbeddedQueue
from penstock.persist.entries import pack, split
from penstock.persist.keeper import Keeper
from penstock.persist.policy import Patience
from penstock.persist.processor import ProcessorStatus
from penstock.persist.queues import ENTRY_BYTES, PersistentQueue, QueueClient, QueueUnavailable, WriterSuperseded
from penstock.persist.spec import ProcessorSpec, keep, kept, local
from penstock.persist.stores import Store
from penstock.storage.staging import StagedSink
from penstock.topology.components import Conf, Context, Source

log = logging.getLogger("penstock.persist")

_PUT = "put"  # file in the task's folder with the newest epoch that is in the queue
_PUT_ENTRIES = 8  # put at a time: at most 4 MB
_PART_BITS = 20  # of an entry's number, for the parts of an epoch


class PersistBolt(StagedSink):
    """Puts results in a queue and acks them; a processor of its own writes them to the store in bulk.

    ``store`` is where they end up: ``SQLiteStore``, ``PostgresStore``, ``ParquetStore`` or your own. ``queue`` is
    where they wait: ``EmbeddedQueue`` (on local disk, the default), ``RedisQueue`` or ``MemcachedQueue``. The
    processor writes ``flush_every`` seconds after its last write, or when ``flush_rows`` rows wait. Results of
    one key are written in the order in which they were put.

    While the queue is full (its ``max_bytes``) or away the bolt takes no tuples, and backpressure does the rest.
    While the store is away, or a call of it takes longer than ``timeout`` seconds, the processor tries again and
    says so in the live view. A row the store refuses for good is a dead letter, in the state directory or in the
    local folder ``dead_letters``.

    At the end of the topology the processor has ``drain_for`` seconds to empty the queue. What is left then is
    written by the next start, or by ``penstock drain``.

    Exactly once, results enter the queue when their epoch is committed. Otherwise a result that was put and whose
    tuple comes again is put again: give the store a ``key`` where that matters.
    """

    commit_interval: ClassVar[float] = 0.0

    def __init__(
        self,
        store: Store,
        queue: PersistentQueue | None = None,
        *,
        flush_every: float = 1.0,
        flush_rows: int = 10_000,
        timeout: float = 60.0,
        drain_for: float = 3.0,
        dead_letters: str | None = None,
    ) -> None:
        queue = EmbeddedQueue() if queue is None else queue
        if not isinstance(store, Store) or not isinstance(queue, PersistentQueue):
            raise TopologyError(
                "PersistBolt",
                f"it needs a store and a queue, and has {type(store).__name__} and {type(queue).__name__}",
                "Write PersistBolt(SQLiteStore('results.db', 'results')).",
            )
        if not flush_every > 0 or flush_rows < 1 or not timeout > 0 or drain_for < 0:
            raise TopologyError(
                "PersistBolt",
                "flush_every, flush_rows and timeout must be greater than 0 and drain_for not "
                f"negative, not {flush_every}, {flush_rows}, {timeout} and {drain_for}",
            )
        self._target, self._mrwq = store, queue
        self._flush_every, self._flush_rows = flush_every, flush_rows
        self._timeout, self._drain_for = timeout, drain_for
        self._dead_letters = None if dead_letters is None else os.path.abspath(dead_letters)

    # ---- the task --------------------------------------------------------------------------------------

    def connect(self, conf: Conf, context: Context) -> None:
        self._target.check(self.where)
        self._mrwq.check(self.where, context.shared)
        self._epochs = context.delivery == "exactly_once"
        self._writer = f"{context.component}/{context.index}"
        self._writer_incarnation: int | None = None
        self._number = 0
        self._in_hand: list[bytes] = []
        self._patience = Patience()
        self._room = 0
        self._prepared_bytes: dict[int, int] = {}
        """Exactly once: of epochs that are staged and not in the queue yet."""
        self._open_bytes = 0
        self._publisher: QueueClient | None = None  # exactly once: of the thread that commits
        self._shown = ProcessorStatus()
        self._keeper: Keeper | None = None
        spec = self._spec(context)
        self._name = spec.name
        self._client = self._mrwq.open(spec.name, context.shared)
        # Now if it can be: a worker that this one replaces must not be the later one.
        with contextlib.suppress(QueueUnavailable):
            self._writer_incarnation = self._client.register(self._writer)
        if context.index == 0:  # a component has one queue, and a queue one processor
            self._check_last_queue(spec)
            keep(spec)
            self._keeper = Keeper(spec.dumps(), self._show)

    def ready(self) -> bool:
        """There is room in the queue, and this task is known there. Asked for whenever as much was taken as there
        was room for."""
        if self._room <= 0 or self._writer_incarnation is None:
            self._room = self._free() // self.context.parallelism
        return self._room > 0

    def write(self, batch: pa.RecordBatch, source: Source) -> None:
        if self._epochs:
            super().write(batch, source)
            self._room -= batch.nbytes
            self._open_bytes += batch.nbytes
        else:
            self._buffer.add(batch, source)

    def prepare_commit(self, epoch: int) -> Any:
        """Exactly once stage the epoch. Otherwise put what was written: it is as good as persisted."""
        if self._epochs:
            token = super().prepare_commit(epoch)
            if token is None:
                return None
            self._prepared_bytes[token["epoch"]], self._open_bytes = self._open_bytes, 0
            return {**token, "incarnation": self._writer_incarnation}
        if not self._in_hand and self._buffer.rows:
            assert self._writer_incarnation is not None  # else it was not ready
            self._in_hand = self._pack(self._buffer.table(), self._writer_incarnation)
            self._buffer.clear()
        self._put_in_hand()
        return None

    def cleanup(self) -> None:
        if self._keeper is not None and not self._keeper.close(self._drain_for):
            log.warning(
                "%s: not all results are in %s yet; the next start or 'penstock drain %s' writes the rest",
                self.where,
                self._target,
                self.context.topology,
            )
        self._client.close()
        if self._publisher is not None:
            self._publisher.close()
        super().cleanup()

    # ---- exactly once ----------------------------------------------------------------------------------

    def commit(self, token: Any) -> None:
        if token is not None:
            self._committing = int(token["incarnation"])
        super().commit(token)

    def published(self) -> int:
        return int(self._store.read(_PUT)) if _PUT in self._store.list() else -1

    def publish(self, epoch: int, rows: pa.Table) -> None:
        """(1) put an epoch's rows, by the incarnation that staged them; (2) record the epoch. A crash in between
        has them put again, by the same names, which the processor knows."""
        if self._publisher is None:
            self._publisher = self._mrwq.open(self._name, self.context.shared)
        if self._writer_incarnation is None:
            try:
                self._writer_incarnation = self._publisher.register(self._writer)
            except QueueUnavailable as error:
                raise SinkBusy(error.where, error.problem, error.hint) from error
        for number, part in enumerate(split(rows, ENTRY_BYTES)):
            entry = pack(self._writer, self._committing, (epoch << _PART_BITS) + number, part)
            try:
                self._publisher.put([entry], self._writer, self._writer_incarnation)
            except QueueUnavailable as error:
                raise SinkBusy(error.where, error.problem, error.hint) from error
            except WriterSuperseded as error:
                raise SinkRefused(error.where, error.problem, error.hint) from error
        self._store.write(_PUT, b"%d" % epoch)
        self._prepared_bytes.pop(epoch, None)

    # ---- parts -----------------------------------------------------------------------------------------

    def _free(self) -> int:
        """Bytes the queue has room for; 0 while it does not answer, which is asked after longer and longer
        pauses, for an answer that does not come holds up the slot."""
        now = time.monotonic()
        if self._patience.wait(now):
            return 0
        try:
            if self._writer_incarnation is None:
                self._writer_incarnation = self._client.register(self._writer)
            free = self._mrwq.max_bytes - self._client.waiting() - sum(list(self._prepared_bytes.values()))
        except QueueUnavailable as error:
            if not self._patience.attempts:
                self.context.report(error)
            self._patience.failed(now)
            return 0
        self._patience.succeeded()
        return max(0, free)

    def _put_in_hand(self) -> None:
        """Put what is packed, a few entries at a time. What the queue may have is put again by the same names."""
        assert self._writer_incarnation is not None or not self._in_hand
        if self._in_hand and self._patience.wait(time.monotonic()):
            raise SinkBusy(self.where, f"{self._mrwq} did not answer the last time")
        while self._in_hand:
            try:
                self._client.put(self._in_hand[:_PUT_ENTRIES], self._writer, self._writer_incarnation or 0)
            except QueueUnavailable as error:
                self._patience.failed(time.monotonic())
                raise SinkBusy(error.where, error.problem, error.hint) from error
            except WriterSuperseded as error:
                raise SinkRefused(error.where, error.problem, error.hint) from error
            except ComponentError:
                self._in_hand = []  # it will never be taken: its tuples fail, the next ones need not
                raise
            self._room -= sum(map(len, self._in_hand[:_PUT_ENTRIES]))
            del self._in_hand[:_PUT_ENTRIES]
        self._patience.succeeded()

    def _pack(self, rows: pa.Table, incarnation: int) -> list[bytes]:
        entries = []
        for part in split(rows, ENTRY_BYTES):
            self._number += 1
            entries.append(pack(self._writer, incarnation, self._number, part))
        return entries

    def _check_last_queue(self, spec: ProcessorSpec) -> None:
        """What waits in another queue than this would wait for ever."""
        last = kept(spec.folder, spec.topology, spec.component)
        if last is None or str(last.queue) == str(spec.queue):
            return
        client = last.queue.open(last.name, last.folder)
        try:
            waiting = client.waiting()
        except QueueUnavailable as error:
            waiting, why = 1, f"it does not answer ({error.problem})"
        else:
            why = f"{waiting:,} bytes wait there"
        finally:
            client.close()
        if waiting:
            raise EnvironmentFault(
                self.where,
                f"it had another queue before, {last.queue}, and cannot leave it yet: {why}",
                f"Empty it first: penstock drain {spec.topology} --component {spec.component}.",
            )

    def _spec(self, context: Context) -> ProcessorSpec:
        shared = local(context.shared)
        if self._dead_letters is not None:
            dead = Path(self._dead_letters) / context.topology / context.component
        elif shared is not None:
            dead = shared / "dead"
        else:
            raise EnvironmentFault(
                self.where,
                f"dead letters need a local folder, and the state directory is {context.shared}",
                "Write PersistBolt(..., dead_letters='/var/lib/penstock').",
            )
        return ProcessorSpec(
            context.topology,
            context.component,
            self._mrwq,
            self._target,
            context.shared,
            str(dead),
            self._flush_every,
            self._flush_rows,
            self._timeout,
        )

    def _show(self, status: ProcessorStatus) -> None:
        """Bring the processor's status to the live view. From the keeper's thread."""
        # Each end of the queue counts what it knew to be in there; the one that knew more is nearer to the truth.
        mine = self._client if self._publisher is None else self._publisher
        status = replace(status, lost=max(status.lost, mine.losses))
        state = f"writing to {self._target}"
        if status.trouble:
            state = f"attempt {status.attempts} failed, next in {status.pause:.1f} s: {status.trouble}"
        rows: list[tuple[str, Any]] = [
            ("written", status.written),
            ("waiting bytes", status.waiting),
            ("state", state),
        ]
        if status.rejected:
            rows.append(("dead letters", status.rejected))
        if status.lost:
            rows.append(("entries lost by the queue", status.lost))
        if status.warning:
            rows.append(("warning", status.warning))
        self.context.publish(rows)
        if status.rejected > self._shown.rejected:
            self.context.report(
                ComponentError(
                    f"{self.where}, {self._target}",
                    f"it refused {status.rejected - self._shown.rejected} rows",
                    f"See them with: penstock dlq list --topology {self.context.topology}.",
                )
            )
        self._shown = status
