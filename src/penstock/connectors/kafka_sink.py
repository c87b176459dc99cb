"""A sink that writes tuples to Kafka with exactly-once semantics."""

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
    connecting,
    fenced,
    library_error,
    log,
    no_answer,
    refused,
    where,
)
from penstock.connectors.kafka_encoding import Encoder, Payload, Record, Row, produce
from penstock.connectors.kafka_epochs import EpochRecords
from penstock.connectors.kafka_rejection import RECORDS_FAULT, Content, RecordSearch, content_of, groups
from penstock.errors import ComponentError, PenstockError, SinkRefused
from penstock.storage.staging import StagedSink
from penstock.topology.components import Conf, Context, Failure, Source

_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 1.0  # seconds before the next attempt; doubled each time
_MESSAGE_BYTES = 1_000_000  # bytes; librdkafka's default for message.max.bytes
_RECORD_OVERHEAD = 36  # bytes that librdkafka adds to key and value before it compares them with that limit


class KafkaSink(StagedSink):
    """Writes the rows of an epoch and a record of the epoch number in one Kafka transaction.

    The epoch record is written to the topic ``<topology>.<component>.epochs``, which the sink creates on the first
    run (compacted, with a partition for each task). Consumers must read with ``isolation.level=read_committed``.

    The transactional id is ``<topology>.<component>.<index>``. It belongs to the process that initialised it last
    (``init_transactions``). Kafka fences the others, so an earlier process of the task that is still alive cannot
    commit. A process initialises the id once, when it starts, and never again: a process that was replaced and
    does not know it would otherwise fence its successor. If its only producer becomes unusable (it is fenced, or
    the library reports a fatal error), the sink raises ``SinkRefused`` and the next query run creates a new one.
    If Kafka does not answer in time, the sink raises ``SystemAway`` and the next ``commit`` continues where this
    one stopped.

    A record that Kafka will never accept (larger than the topic's ``max.message.bytes``, or without a key in a
    compacted topic) becomes a dead letter; all others are written. ``kafka_rejection`` lists the errors that mean
    this.
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
        """The arguments are those of ``KafkaBolt``. ``timeout`` is the time in seconds within which Kafka must
        accept an epoch; it should be longer than the restart of a broker."""
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
            **connecting(self._options),
        }
        self._largest = int(self._options.get("message.max.bytes", _MESSAGE_BYTES)) - _RECORD_OVERHEAD
        topic = f"{context.topology}.{context.component}.epochs"
        self._epochs = EpochRecords(self._at, self._bootstrap, topic, context.index, self._shared)
        self._epochs.create(context.parallelism, ANSWER_SECONDS)
        self._published: int | None = None
        self._begun = False
        self._search, self._search_epoch = RecordSearch(), -1
        self._reported_epoch = -1
        self._suspects: dict[Content, str] = {}
        """Records of the open transaction that Kafka refused, with its error message."""
        self._committing: int | None = None  # the epoch whose commit was requested and not answered
        self._producer = self._new_producer()

    def published(self) -> int:
        if self._published is None:  # read once: only this process can change it
            self._published = self._epochs.newest(self.identity, self._timeout)
        return self._published

    def write(self, batch: pa.RecordBatch, source: Source) -> None:
        """Rows that cannot become records are rejected here: once their epoch is committed it must be
        published."""
        batch = self._buffer.plain(batch, source)  # the form in which it is read from the staged file
        self._encoder.check(batch, self._at, self._largest)
        super().write(batch, source)

    def publish(self, epoch: int, rows: pa.Table) -> None:
        """Steps: (1) begin the transaction; (2) produce the rows; (3) produce the record of the epoch; (4) store
        dead letters for the rows that are left out; (5) commit. After a failure the transaction is aborted and
        repeated from step 1, unless the epoch turns out to be published; a commit that was not answered is
        requested again. Between two attempts, records that Kafka refused are sent on their own to find those that
        it rejects."""
        deadline = time.monotonic() + self._timeout
        pause = _FIRST_PAUSE
        if self._search_epoch != epoch:
            group_bytes = self._search.group_bytes  # a property of the topic, not of the epoch
            self._search, self._search_epoch = RecordSearch(), epoch
            self._search.group_bytes = group_bytes
        while (known := self.published()) < epoch:
            try:
                if self._search.piece is None or self._begun:
                    self._transact(epoch, rows, deadline)
                else:
                    self._probe(self._search.piece, deadline)
                    self._search.on_accepted()
                    self._published = known
            except (self._kafka.KafkaException, SystemError) as failed:
                error = self._undo(library_error(failed).args[0], deadline)
                if not self._begun and self._suspects and not _is_unusable(error):
                    self._continue_search()
                    self._published = known
                    if time.monotonic() < deadline:
                        continue
                if _is_unusable(error) or time.monotonic() + pause > deadline:
                    raise self._failure(error) from failed
                log.warning("%s: epoch %d was not written to Kafka: %s; retrying", self._at, epoch, error.str())
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)
        self.errors.clear()

    def cleanup(self) -> None:
        self._epochs.close()
        super().cleanup()

    def _transact(self, epoch: int, rows: pa.Table, deadline: float) -> None:
        if self._begun:  # an earlier call left the transaction open
            self._end(deadline)
            return
        self._begin()
        self._send(self._records(epoch, rows), deadline)
        self._store_rejected(epoch, rows)
        self._committing = epoch
        self._end(deadline)

    def _probe(self, piece: list[Content], deadline: float) -> None:
        """Send the records in a separate transaction, which is aborted."""
        self._begin()
        self._send(iter(piece), deadline)
        if self._producer.flush(max(0.1, deadline - time.monotonic())):
            raise self._kafka.KafkaException(self._kafka.KafkaError(self._kafka.KafkaError._TIMED_OUT))
        self._end(deadline)

    def _begin(self) -> None:
        self._suspects = {}
        self._producer.begin_transaction()
        self._begun = True

    def _send(self, records: Iterator[Record], deadline: float) -> None:
        """Produce records and wait for the answers until the deadline. Raises ``KafkaException`` if Kafka refuses
        some."""
        most = self._search.group_bytes
        try:
            for group in [records] if most is None else groups(records, most):
                produce(self._producer, iter(group), max(0.1, deadline - time.monotonic()))
                self._producer.flush(max(0.1, deadline - time.monotonic()))
        except BufferError as full:
            raise self._kafka.KafkaException(self._kafka.KafkaError(self._kafka.KafkaError._QUEUE_FULL)) from full
        except self._kafka.KafkaException as failed:
            if failed.args[0].name() != "_STATE":
                raise
            self._producer.poll(0)  # fetch the answer after which nothing more may be produced
            refused = self._kafka.KafkaError(self._kafka.KafkaError._PURGE_QUEUE)
            raise self._kafka.KafkaException(refused) from failed
        if self._suspects:
            raise self._kafka.KafkaException(self._kafka.KafkaError(self._kafka.KafkaError._PURGE_QUEUE))

    def _on_delivery(self, error: Any, message: Any) -> None:
        """Called by the library for each record that was not written."""
        if error is not None and error.name() in RECORDS_FAULT:
            self._suspects[message.topic(), message.value(), message.key()] = f"{error.name()}: {error.str()}"

    def _continue_search(self) -> None:
        if self._search.piece is None:
            self._search.suspect(self._suspects)
        else:
            self._search.on_refused(next(iter(self._suspects.values())))
        self._suspects = {}

    def _store_rejected(self, epoch: int, rows: pa.Table) -> None:
        """Store dead letters for the rows that Kafka will never accept. Called without any too: existing dead
        letters of this epoch belong to an attempt that Kafka did not commit."""
        if not self._search.rejected:
            self.context.add_dead_letters([], [], once=self.dead_letters_name(epoch))
            return
        found = [self._search.rejected.get(content_of(record)) for record in self._all_records(rows)]
        rejected = [(number, error) for number, error in enumerate(found) if error is not None]
        dead_letters = [tuple(row.values()) for row in rows.take([number for number, _ in rejected]).to_pylist()]
        failures = [Failure(self.context.component, f"Kafka rejects the record: {error}") for _, error in rejected]
        self.context.add_dead_letters(dead_letters, failures, once=self.dead_letters_name(epoch))
        if self._reported_epoch == epoch:
            return
        self._reported_epoch = epoch
        self.context.report(
            ComponentError(
                f"{self._at}, Kafka at {self._bootstrap}",
                f"Kafka rejected {len(rejected)} records: {rejected[0][1]}",
                "They are among the dead letters: penstock dlq list. All other rows are written.",
            )
        )

    def _end(self, deadline: float) -> None:
        """End the open transaction. If this raises, the library requires the same call again."""
        commit = self._committing is not None
        self._retry_until(
            self._producer.commit_transaction if commit else self._producer.abort_transaction, deadline
        )
        self._published = self._committing  # None after an abort: read it again
        self._begun, self._committing = False, None

    def _records(self, epoch: int, rows: pa.Table) -> Iterator[Record]:
        """The records to write: the rows that Kafka does not reject, and the record of the epoch."""
        rejected = self._search.rejected
        for record in self._all_records(rows):
            if not rejected or content_of(record) not in rejected:
                yield record
        yield self._epochs.record(self.identity, epoch)

    def _all_records(self, rows: pa.Table) -> Iterator[Record]:
        for batch in rows.to_batches(max_chunksize=10_000):
            yield from self._encoder.records(batch, self._at)

    def _retry_until(self, call: Callable[[float], Any], deadline: float) -> None:
        """Repeat the call until it succeeds or raises an error that Kafka does not call retriable."""
        while True:
            try:
                call(max(0.1, deadline - time.monotonic()))
                return
            except self._kafka.KafkaException as failed:
                error = failed.args[0]
                if not error.retriable() or error.txn_requires_abort() or time.monotonic() > deadline:
                    raise
                time.sleep(_FIRST_PAUSE)

    def _undo(self, error: Any, deadline: float) -> Any:
        """Abort the open transaction, unless its commit may still be answered. Returns the error that decides how
        to continue."""
        if error.txn_requires_abort() or self._suspects:
            self._committing = None
        if self._begun and self._committing is None and not _is_unusable(error):
            try:
                self._end(deadline)
            except (self._kafka.KafkaException, SystemError) as failed:
                return library_error(failed).args[0]
        return error

    def _new_producer(self) -> Any:
        """Initialise the transactional id, which also ends a transaction that an earlier process left open."""
        producer = self._kafka.Producer(
            {
                **self._shared,
                "transactional.id": self._id,
                "linger.ms": 5,
                "delivery.report.only.error": True,
                "on_delivery": self._on_delivery,
                "message.timeout.ms": int(self._timeout * 1000),
                "transaction.timeout.ms": int(self._timeout * 2000),
            }
        )
        ask(self._at, self._bootstrap, producer.init_transactions)
        return producer

    def _failure(self, error: Any) -> PenstockError:
        if _is_unusable(error):
            return SinkRefused(*refused(self._at, self._bootstrap, error).args)
        problem = f"Kafka did not accept an epoch within {self._timeout:.0f} s ({error.str()})"
        return no_answer(self._at, self._bootstrap, problem)


def _is_unusable(error: Any) -> bool:
    """True if no call on this producer can succeed again: it is fenced, it failed, or its state differs from
    ours."""
    return fenced(error) or error.fatal() or error.name() == "_STATE"
