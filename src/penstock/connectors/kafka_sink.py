"""A sink that writes tuples to Kafka, exactly once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from types import MappingProxyType
from typing import Any

import pyarrow as pa

from penstock.connectors.kafka_client import (
    ANSWER_SECONDS,
    BrokerErrors,
    Options,
    ask,
    client_library,
    log,
    no_answer,
    refused,
    where,
)
from penstock.connectors.kafka_encoding import Encoder, Payload, Record, Row, produce
from penstock.connectors.kafka_epochs import EpochNotes
from penstock.connectors.staging import StagedSink
from penstock.topology.components import Conf, Context, Source

_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 1.0  # seconds before trying again; doubled each time
_MESSAGE_BYTES = 1_000_000  # librdkafka's default of message.max.bytes
_RECORD_OVERHEAD = 36  # bytes it adds to a record's key and value before it compares them with that


class KafkaSink(StagedSink):
    """Writes the rows of an epoch in one Kafka transaction, together with a note of the epoch: both or neither.

    The note is a record in the topic ``<topology>.<component>.epochs``, which the sink makes on the first run
    (compacted, a partition for each task). The transactional id is ``<topology>.<component>.<index>``: an
    earlier process of the task that still runs cannot commit any more. Consumers must read with
    ``isolation.level=read_committed``.
    """

    def __init__(
        self,
        bootstrap: str,
        topic: str | Callable[[Row], str],
        *,
        key_field: str | None = None,
        value_field: str | None = None,
        value: Callable[[Row], Payload] | None = None,
        timeout: float = 15.0,
        options: Options = MappingProxyType({}),
    ) -> None:
        """As for ``KafkaBolt``. ``timeout``: seconds until an epoch that Kafka does not take
        is an error; a restarted broker is waited for."""
        self._encoder = Encoder("KafkaSink", topic, key_field, value_field, value)
        self._bootstrap, self._timeout, self._options = bootstrap, timeout, dict(options)

    def connect(self, conf: Conf, context: Context) -> None:
        self._kafka = client_library()
        self._at = where(context.component, context.task)
        self._id = f"{context.topology}.{context.component}.{context.index}"
        self.errors = BrokerErrors(self._at, self._bootstrap)
        self._shared = {
            "bootstrap.servers": self._bootstrap,
            "error_cb": self.errors.note,
            "log_level": 2,
            **self._options,
        }
        self._largest = int(self._options.get("message.max.bytes", _MESSAGE_BYTES)) - _RECORD_OVERHEAD
        topic = f"{context.topology}.{context.component}.epochs"
        self._notes = EpochNotes(self._at, self._bootstrap, topic, context.index, self._shared)
        self._notes.create(context.parallelism, ANSWER_SECONDS)
        self._published: int | None = None
        # Now, not at the first epoch: this ends what an earlier process left open.
        self._producer: Any = self._new_producer(time.monotonic() + ANSWER_SECONDS)

    def published(self) -> int:
        if self._published is None:  # asked once: only this process can change it
            if self._producer is None:  # it ends what was left open, which would hide what is published
                self._producer = self._new_producer(time.monotonic() + self._timeout)
            self._published = self._notes.newest(self.identity, self._timeout)
        return self._published

    def write(self, batch: pa.RecordBatch, source: Source) -> None:
        """Rows that cannot become records are refused now: once their epoch is committed it must be published."""
        batch = self._buffer.plain(batch, source)  # as it will come back from the staged file
        self._encoder.check(batch, self._at, self._largest)
        super().write(batch, source)

    def publish(self, epoch: int, rows: pa.Table) -> None:
        """In numbered steps: (1) begin; (2) produce the rows; (3) produce the note of the epoch; (4) commit. What
        fails is undone and done again from step 1, unless the epoch turns out to be there; a commit that is not
        answered is asked for again until it is."""
        deadline = time.monotonic() + self._timeout
        pause = _FIRST_PAUSE
        while self.published() < epoch:
            try:
                self._transact(epoch, rows, deadline)
                self._published = epoch
            except self._kafka.KafkaException as failed:
                error = failed.args[0]
                self._undo(error, deadline)
                if _fenced(error) or time.monotonic() + pause > deadline:
                    raise self._failure(error) from failed
                log.warning("%s: epoch %d not written to Kafka: %s; trying again", self._at, epoch, error.str())
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)
        self.errors.clear()

    def cleanup(self) -> None:
        self._notes.close()
        super().cleanup()

    def _transact(self, epoch: int, rows: pa.Table, deadline: float) -> None:
        producer = self._producer
        producer.begin_transaction()
        try:
            produce(producer, self._records(epoch, rows), max(0.1, deadline - time.monotonic()))
        except BufferError as full:
            raise self._kafka.KafkaException(self._kafka.KafkaError(self._kafka.KafkaError._QUEUE_FULL)) from full
        self._insist(producer.commit_transaction, deadline)

    def _records(self, epoch: int, rows: pa.Table) -> Iterator[Record]:
        for batch in rows.to_batches(max_chunksize=10_000):
            yield from self._encoder.records(batch, self._at)
        yield self._notes.note(self.identity, epoch)

    def _insist(self, call: Callable[[float], Any], deadline: float) -> None:
        """Call until it succeeds or fails for good; what Kafka calls retriable may be called again as it is."""
        while True:
            try:
                call(max(0.1, deadline - time.monotonic()))
                return
            except self._kafka.KafkaException as failed:
                error = failed.args[0]
                if not error.retriable() or error.txn_requires_abort() or time.monotonic() > deadline:
                    raise
                time.sleep(_FIRST_PAUSE)

    def _undo(self, error: Any, deadline: float) -> None:
        """End the open transaction: abort it where that is offered; else drop the producer, for the next one's
        start ends whatever this one left open, and look again at what is published. A fenced producer is kept:
        a new one would fence its successor in turn."""
        if _fenced(error):
            return
        if error.txn_requires_abort():
            try:
                self._insist(self._producer.abort_transaction, deadline)
                return
            except self._kafka.KafkaException as failed:
                error = failed.args[0]
        self._producer.purge()
        self._producer = self._published = None

    def _new_producer(self, deadline: float) -> Any:
        producer = self._kafka.Producer(
            {
                **self._shared,
                "transactional.id": self._id,
                "linger.ms": 5,
                "message.timeout.ms": int(self._timeout * 1000),
                "transaction.timeout.ms": int(self._timeout * 2000),
            }
        )
        ask(self._at, self._bootstrap, producer.init_transactions, deadline - time.monotonic())
        return producer

    def _failure(self, error: Any) -> Exception:
        if _fenced(error) or error.fatal():
            return refused(self._at, self._bootstrap, error)
        rule = f"Kafka takes an epoch within {self._timeout:.0f} s"
        return no_answer(self._at, self._bootstrap, rule, error.str())


def _fenced(error: Any) -> bool:
    return error.name() in ("_FENCED", "PRODUCER_FENCED", "INVALID_PRODUCER_EPOCH")
