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
    connecting,
    fenced,
    library_error,
    log,
    no_answer,
    refused,
    where,
)
from penstock.connectors.kafka_encoding import Encoder, Payload, Record, Row, produce
from penstock.connectors.kafka_epochs import EpochNotes
from penstock.connectors.kafka_rejection import RECORDS_FAULT, Content, RecordSearch, content_of, groups
from penstock.errors import ComponentError, PenstockError, SinkRefused
from penstock.storage.staging import StagedSink
from penstock.topology.components import Conf, Context, Failure, Source

_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 1.0  # seconds before trying again; doubled each time
_MESSAGE_BYTES = 1_000_000  # librdkafka's default of message.max.bytes
_RECORD_OVERHEAD = 36  # bytes it adds to a record's key and value before it compares them with that


class KafkaSink(StagedSink):
    """Writes the rows of an epoch in one Kafka transaction, together with a note of the epoch: both or neither.

    The note is a record in the topic ``<topology>.<component>.epochs``, which the sink makes on the first run
    (compacted, a partition for each task). Consumers must read with ``isolation.level=read_committed``.

    The transactional id is ``<topology>.<component>.<index>``. It belongs to the process that asked for it last
    (``init_transactions``); Kafka fences the others, so an earlier process of the task that still runs cannot
    commit any more. A process asks once, when it starts, and never again, whatever fails: one that was replaced
    and does not know it would push its successor out. What its one producer cannot mend - it is fenced, or the
    library calls it broken - is ``SinkRefused``: the topology's next start mends it. What Kafka did not answer in
    time is ``SystemAway``: the next ``commit`` goes on where this one stopped.

    A record that Kafka will never accept (larger than the topic's ``max.message.bytes``, without a key in a
    compacted topic) is a dead letter; all others are written. ``kafka_rejection`` says which errors mean that.
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
            **connecting(self._options),
        }
        self._largest = int(self._options.get("message.max.bytes", _MESSAGE_BYTES)) - _RECORD_OVERHEAD
        topic = f"{context.topology}.{context.component}.epochs"
        self._notes = EpochNotes(self._at, self._bootstrap, topic, context.index, self._shared)
        self._notes.create(context.parallelism, ANSWER_SECONDS)
        self._published: int | None = None
        self._begun = False
        self._search, self._search_epoch = RecordSearch(), -1
        self._reported_epoch = -1
        self._suspects: dict[Content, str] = {}
        """Records of the open transaction that Kafka refused, and what it said."""
        self._committing: int | None = None  # the epoch whose commit was asked for and not answered
        self._producer = self._new_producer()

    def published(self) -> int:
        if self._published is None:  # asked once: only this process can change it
            self._published = self._notes.newest(self.identity, self._timeout)
        return self._published

    def write(self, batch: pa.RecordBatch, source: Source) -> None:
        """Rows that cannot become records are refused now: once their epoch is committed it must be published."""
        batch = self._buffer.plain(batch, source)  # as it will come back from the staged file
        self._encoder.check(batch, self._at, self._largest)
        super().write(batch, source)

    def publish(self, epoch: int, rows: pa.Table) -> None:
        """In numbered steps: (1) begin; (2) produce the rows; (3) produce the note of the epoch; (4) store dead
        letters of the rows that are left out; (5) commit. What fails is aborted and done again from step 1, unless
        the epoch turns out to be there; a commit that is not answered is asked for again until it is. Between two
        attempts, records that Kafka refused are looked at alone."""
        deadline = time.monotonic() + self._timeout
        pause = _FIRST_PAUSE
        if self._search_epoch != epoch:
            group_bytes = self._search.group_bytes  # holds for the topic, not for the epoch
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
                if not self._begun and self._suspects and not _beyond_mending(error):
                    self._note_suspects()
                    self._published = known
                    if time.monotonic() < deadline:
                        continue
                if _beyond_mending(error) or time.monotonic() + pause > deadline:
                    raise self._failure(error) from failed
                log.warning("%s: epoch %d not written to Kafka: %s; trying again", self._at, epoch, error.str())
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)
        self.errors.clear()

    def cleanup(self) -> None:
        self._notes.close()
        super().cleanup()

    def _transact(self, epoch: int, rows: pa.Table, deadline: float) -> None:
        if self._begun:  # an earlier call left it open
            self._end(deadline)
            return
        self._begin()
        self._send(self._records(epoch, rows), deadline)
        self._store_rejected(epoch, rows)
        self._committing = epoch
        self._end(deadline)

    def _probe(self, piece: list[Content], deadline: float) -> None:
        """Offer the records in a transaction of their own, which nobody will see."""
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
        """Produce records and wait for the answers, as long as there is time. Raises where Kafka refuses some."""
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
            self._producer.poll(0)  # for the answer because of which no more may be produced
            refused = self._kafka.KafkaError(self._kafka.KafkaError._PURGE_QUEUE)
            raise self._kafka.KafkaException(refused) from failed
        if self._suspects:
            raise self._kafka.KafkaException(self._kafka.KafkaError(self._kafka.KafkaError._PURGE_QUEUE))

    def _note_delivery(self, error: Any, message: Any) -> None:
        """Called by the library for a record that was not written."""
        if error is not None and error.name() in RECORDS_FAULT:
            self._suspects[message.topic(), message.value(), message.key()] = f"{error.name()}: {error.str()}"

    def _note_suspects(self) -> None:
        if self._search.piece is None:
            self._search.suspect(self._suspects)
        else:
            self._search.on_refused(next(iter(self._suspects.values())))
        self._suspects = {}

    def _store_rejected(self, epoch: int, rows: pa.Table) -> None:
        """Make dead letters of the rows that Kafka will never take. Also without any: dead letters that there are
        of this epoch are of an attempt that Kafka did not commit."""
        if not self._search.rejected:
            self.context.add_dead_letters([], [], once=self.dead_letters_name(epoch))
            return
        found = [self._search.rejected.get(content_of(record)) for record in self._all_records(rows)]
        rejected = [(number, said) for number, said in enumerate(found) if said is not None]
        dead_letters = [tuple(row.values()) for row in rows.take([number for number, _ in rejected]).to_pylist()]
        failures = [Failure(self.context.component, f"Kafka rejects the record: {said}") for _, said in rejected]
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
        """End the open transaction. If this raises, the library wants the same call again."""
        commit = self._committing is not None
        self._retry_until(
            self._producer.commit_transaction if commit else self._producer.abort_transaction, deadline
        )
        self._published = self._committing  # after an abort look again
        self._begun, self._committing = False, None

    def _records(self, epoch: int, rows: pa.Table) -> Iterator[Record]:
        """What is to be written: the rows that Kafka does not reject, and the note of the epoch."""
        rejected = self._search.rejected
        for record in self._all_records(rows):
            if not rejected or content_of(record) not in rejected:
                yield record
        yield self._notes.note(self.identity, epoch)

    def _all_records(self, rows: pa.Table) -> Iterator[Record]:
        for batch in rows.to_batches(max_chunksize=10_000):
            yield from self._encoder.records(batch, self._at)

    def _retry_until(self, call: Callable[[float], Any], deadline: float) -> None:
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

    def _undo(self, error: Any, deadline: float) -> Any:
        """Abort the open transaction, unless its commit may yet be answered. Returns the error to go by."""
        if error.txn_requires_abort() or self._suspects:
            self._committing = None
        if self._begun and self._committing is None and not _beyond_mending(error):
            try:
                self._end(deadline)
            except (self._kafka.KafkaException, SystemError) as failed:
                return library_error(failed).args[0]
        return error

    def _new_producer(self) -> Any:
        """Takes the transactional id, and ends what an earlier process left open."""
        producer = self._kafka.Producer(
            {
                **self._shared,
                "transactional.id": self._id,
                "linger.ms": 5,
                "delivery.report.only.error": True,
                "on_delivery": self._note_delivery,
                "message.timeout.ms": int(self._timeout * 1000),
                "transaction.timeout.ms": int(self._timeout * 2000),
            }
        )
        ask(self._at, self._bootstrap, producer.init_transactions)
        return producer

    def _failure(self, error: Any) -> PenstockError:
        if _beyond_mending(error):
            return SinkRefused(*refused(self._at, self._bootstrap, error).args)
        problem = f"Kafka did not take an epoch within {self._timeout:.0f} s ({error.str()})"
        return no_answer(self._at, self._bootstrap, problem)


def _beyond_mending(error: Any) -> bool:
    """No call on this producer will succeed again: it is fenced, broken, or at odds with us on what is open."""
    return fenced(error) or error.fatal() or error.name() == "_STATE"
