"""The bolt of the delayed persistent queue: it puts results into a queue and does not wait for the store."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa

from penstock.errors import ComponentError, EnvironmentFault, SinkBusy, SinkRefused, TopologyError
from penstock.persist.embedded import EmbeddedQueue
from penstock.persist.entries import pack, split
from penstock.persist.keeper import Keeper
from penstock.persist.processor import ProcessorStatus
from penstock.persist.queues import ENTRY_BYTES, PersistentQueue, QueueClient, QueueUnavailable, WriterSuperseded
from penstock.persist.spec import ProcessorSpec, load_from_folder, local_path, save
from penstock.persist.stores import Store
from penstock.persist.writer import QueueWriter
from penstock.storage.staging import StagedSink
from penstock.topology.components import Conf, Context, Source

log = logging.getLogger("penstock.persist")

_PUT = "put"  # file in the task's folder with the newest epoch that is in the queue
_PART_BITS = 20  # bits of an entry's number for the parts of an epoch: up to a million parts of 512 KB


class PersistBolt(StagedSink):
    """Puts results into a queue and acks them; a separate process, the processor, writes them to the store in bulk
    (*Lu 2020*, section 4.4, algorithm 3).

    ``store`` is the destination: ``SQLiteStore``, ``PostgresStore``, ``ParquetStore`` or your own. ``queue`` holds
    the results until they are written: ``EmbeddedQueue`` (on a local disk, the default), ``RedisQueue``,
    ``MemoryQueue`` or ``MemcachedQueue``. The processor writes ``flush_every`` seconds after its last write, or
    when ``flush_rows`` rows are waiting. Results with the same key are written in the order in which they were
    put.

    While the queue is full (its ``max_bytes``) or unavailable, the bolt accepts no tuples, and backpressure slows
    down the topology. While the store is unavailable, or a call of it takes longer than ``timeout`` seconds, the
    processor retries and reports this in the live view. A row that the store rejects permanently becomes a dead
    letter, in the state directory or in the local folder ``dead_letters``.

    When the topology ends, the processor has ``drain_for`` seconds to empty the queue. The next run, or
    ``penstock drain``, writes the rest.

    With exactly-once delivery, results enter the queue when their epoch is committed. Otherwise a result is put
    again if its tuple is replayed; give the store a ``key`` if this matters.
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
        self._target, self._queue = store, queue
        self._flush_every, self._flush_rows = flush_every, flush_rows
        self._timeout, self._drain_for = timeout, drain_for
        self._dead_letters = None if dead_letters is None else os.path.abspath(dead_letters)

    def cautions(self, where: str, delivery: str) -> Sequence[str]:
        if delivery == "exactly_once" and not self._queue.exactly_once:
            raise TopologyError(
                where,
                f"its queue, {self._queue}, cannot keep exactly-once delivery: {self._queue.volatile}",
                "Use EmbeddedQueue or RedisQueue, or at_least_once.",
            )
        return [f"results wait {self._queue}: {self._queue.volatile}."] if self._queue.volatile else []

    # -- the task

    def connect(self, conf: Conf, context: Context) -> None:
        self._target.check(self.where)
        self._queue.check(self.where, context.shared)
        self._epochs = context.delivery == "exactly_once"
        self._prepared_bytes: dict[int, int] = {}
        """With exactly-once delivery, the size of the epochs that are staged and not in the queue yet."""
        self._open_bytes = 0
        self._publisher: QueueClient | None = None  # exactly-once delivery: the client of the committing thread
        self._shown = ProcessorStatus()
        self._keeper: Keeper | None = None
        spec = self._spec(context)
        self._name = spec.name
        client = self._queue.open(spec.name, context.shared)
        self._writer = QueueWriter(
            f"{context.component}/{context.index}", self._queue, client, self.where, context.report
        )
        if context.index == 0:  # a component has one queue, and a queue has one processor
            self._check_previous_queue(spec)
            save(spec)
            self._keeper = Keeper(spec.dumps(), self._show)

    def ready(self) -> bool:
        """True if the queue has room and this task is registered there. The queue is asked whenever the room that
        it reported last is used up."""
        if self._writer.room <= 0 or self._writer.incarnation is None:
            self._writer.update_room(sum(list(self._prepared_bytes.values())), self.context.parallelism)
        return self._writer.room > 0

    def write(self, batch: pa.RecordBatch, source: Source) -> None:
        if self._epochs:
            super().write(batch, source)
            self._writer.room -= batch.nbytes
            self._open_bytes += batch.nbytes
        else:
            self._buffer.add(batch, source)

    def prepare_commit(self, epoch: int) -> Any:
        """With exactly-once delivery, stage the epoch. Otherwise put what was written, which makes it durable."""
        if self._epochs:
            token = super().prepare_commit(epoch)
            if token is None:
                return None
            self._prepared_bytes[token["epoch"]], self._open_bytes = self._open_bytes, 0
            return {**token, "incarnation": self._writer.incarnation}
        if not self._writer.has_packed and self._buffer.rows:
            self._writer.pack(self._buffer.table())
            self._buffer.clear()
        self._writer.put_packed()
        return None

    def cleanup(self) -> None:
        if self._keeper is not None and not self._keeper.close(self._drain_for):
            log.warning(
                "%s: not all results are in %s yet; the next run or 'penstock drain %s' writes the rest",
                self.where,
                self._target,
                self.context.topology,
            )
        self._writer.client.close()
        if self._publisher is not None:
            self._publisher.close()
        super().cleanup()

    # -- exactly-once delivery

    def commit(self, token: Any) -> None:
        if token is not None:
            self._committing = int(token["incarnation"])
        super().commit(token)

    def published(self) -> int:
        return int(self._store.read(_PUT)) if _PUT in self._store.list() else -1

    def publish(self, epoch: int, rows: pa.Table) -> None:
        """Steps: (1) put the rows of the epoch under the incarnation that staged them; (2) record the epoch. After
        a crash between the two the rows are put again with the same names, so the processor recognises them."""
        if self._publisher is None:
            self._publisher = self._queue.open(self._name, self.context.shared)
        writer = self._writer
        if writer.incarnation is None:
            try:
                writer.incarnation = self._publisher.register(writer.name)
            except QueueUnavailable as error:
                raise SinkBusy(error.where, error.problem, error.hint) from error
        for number, part in enumerate(split(rows, ENTRY_BYTES)):
            entry = pack(writer.name, self._committing, (epoch << _PART_BITS) + number, part)
            try:
                self._publisher.put([entry], writer.name, writer.incarnation)
            except QueueUnavailable as error:
                raise SinkBusy(error.where, error.problem, error.hint) from error
            except WriterSuperseded as error:
                raise SinkRefused(error.where, error.problem, error.hint) from error
        self._store.write(_PUT, b"%d" % epoch)
        self._prepared_bytes.pop(epoch, None)

    # -- the processor

    def _check_previous_queue(self, spec: ProcessorSpec) -> None:
        """Raise ``EnvironmentFault`` if the component had another queue before that is not empty: nobody would
        write its results."""
        last = load_from_folder(spec.folder, spec.topology, spec.component)
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
        shared = local_path(context.shared)
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
            self._queue,
            self._target,
            context.shared,
            str(dead),
            self._flush_every,
            self._flush_rows,
            self._timeout,
        )

    def _show(self, status: ProcessorStatus) -> None:
        """Show the status of the processor in the live view. Called by the keeper's thread."""
        # Each end of the queue counts the losses that it knows of; the larger number is closer to the truth.
        client = self._writer.client if self._publisher is None else self._publisher
        status = replace(status, lost=max(status.lost, client.losses))
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
        if self._queue.volatile:
            rows.append(("caution", self._queue.volatile))
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
        if status.lost > self._shown.lost:
            lost = status.lost - self._shown.lost
            self.context.report(
                ComponentError(
                    self.where,
                    f"the queue {self._queue} has lost {lost} entries: their results were acknowledged and will "
                    "not be in the store",
                    "Compute them again if they matter. EmbeddedQueue and RedisQueue lose none, and "
                    "MemcachedQueue with copies=2 loses none when one server dies.",
                )
            )
        self._shown = status
