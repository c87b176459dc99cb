"""A bolt that writes tuples to Kafka with at-least-once semantics."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Any

import pyarrow as pa

from penstock.connectors.kafka_client import BrokerErrors, Options, client_library, library_error, where
from penstock.connectors.kafka_encoding import Encoder, Payload, Row, produce
from penstock.connectors.kafka_rejection import RECORDS_FAULT
from penstock.errors import ComponentError, PenstockError, SinkBusy
from penstock.topology.components import Conf, Context, Failure, Source, TransactionalSink

_FLUSH_SECONDS = 2.0  # the longest time a commit blocks its worker; the worker counts as dead after 20 s


class KafkaBolt(TransactionalSink):
    """Writes each tuple as a record. A tuple is acked when Kafka has accepted its record, so some records are
    duplicated after a failure, and consumers see records before their epoch is committed. Use ``KafkaSink`` for
    exactly-once delivery.

    The topic is a name or a function of the row (a dict). The key is a field. The value is a field, a function of
    the row, the only field, or the row as JSON. Records with the same key stay in order, even after network
    errors.
    """

    commit_interval = 0.1  # seconds; a flush is fast, and with 50,000 tuples in flight allows 500,000 per second

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
        """``timeout`` is the time in seconds that Kafka may take to accept a record: longer than the restart of a
        broker, shorter than the 20 s after which a silent worker counts as dead. ``options`` are options of
        librdkafka, for security and tuning."""
        self._encoder = Encoder("KafkaBolt", topic, key_field, value_field, value)
        self._bootstrap, self._timeout, self._options = bootstrap, timeout, dict(options)

    def prepare(self, conf: Conf, context: Context) -> None:
        self._context = context
        self._where = where(context.component, context.task)
        self._written: list[pa.RecordBatch] = []
        """The rows since the last commit, to be produced again if Kafka did not accept them."""
        self._lost = ""
        """Why all of them have to be produced again; empty if they do not."""
        self._start()

    def _start(self) -> None:
        self.errors = BrokerErrors(self._where, self._bootstrap)
        undelivered: list[tuple[Any, Any]] = []
        self._undelivered = undelivered
        self._suspects: list[tuple[Any, Any]] = []
        self._producer = client_library().Producer(
            {
                "bootstrap.servers": self._bootstrap,
                "enable.idempotence": True,
                "message.timeout.ms": int(self._timeout * 1000),
                "delivery.report.only.error": True,  # a callback per record would halve the throughput
                "on_delivery": lambda error, message: undelivered.append((error, message)),
                "error_cb": self.errors.note,
                "linger.ms": 5,
                "log_level": 2,
                **self._options,
            }
        )

    def recover(self, tokens: Sequence[Any]) -> None:
        """Does nothing: no record waits for a commit."""

    def write(self, batch: pa.RecordBatch, source: Source) -> None:
        """If it raises, some of the records may already have been sent; they are sent again."""
        try:
            produce(self._producer, self._encoder.records(batch, self._where), self._timeout)
        except BufferError:
            raise self._busy(f"the producer's queue has been full for {self._timeout:.0f} s") from None
        except client_library().KafkaException as failed:
            if failed.args[0].name() not in RECORDS_FAULT:
                raise
            raise self._rejected(failed) from failed
        except (PenstockError, OSError):
            raise
        except Exception as failed:  # topic= and value= are user code, and the library checks what they return
            raise self._rejected(failed) from failed
        self._written.append(batch)
        self._producer.poll(0)

    def prepare_commit(self, epoch: int) -> Any:
        """Wait up to ``_FLUSH_SECONDS`` until Kafka has accepted everything. Raises ``SinkBusy`` if it has not;
        the next call continues. A record that Kafka rejects permanently becomes a dead letter."""
        if self._lost:
            self._produce_again()
        if not self._written:
            return None
        try:
            if self._producer.flush(_FLUSH_SECONDS):
                raise self._busy(next(iter(self.errors.counts), "no answer"))
        except (client_library().KafkaException, SystemError) as failed:
            self._lost = library_error(failed).args[0].str()
            raise self._busy(self._lost) from failed
        try:
            self.errors.check()
        except ComponentError as hopeless:  # for this producer; an operator may resolve it
            self._lost = hopeless.problem
        for error, _ in self._undelivered:
            if error.name() not in RECORDS_FAULT:
                self._lost = self._lost or f"{len(self._undelivered)} not accepted: {error.str()}"
        if self._lost:
            raise self._busy(self._lost)
        self._store_rejected()
        self.errors.clear()
        self._written = []
        return None

    def commit(self, token: Any) -> None:
        """Does nothing: the records are visible already."""

    def cleanup(self) -> None:
        self._producer.flush(self._timeout + 1.0)

    def _produce_again(self) -> None:
        """Produce all records since the last commit with a new producer: it is unknown which ones the old producer
        has sent."""
        self._producer.purge()
        self._start()
        for batch in self._written:
            try:
                produce(self._producer, self._encoder.records(batch, self._where), self._timeout)
            except BufferError:
                raise self._busy("the producer's queue is full") from None
        self._lost = ""

    def _store_rejected(self) -> None:
        """Kafka rejects a batch of records as a whole, so each record is sent once more on its own. A record that
        is then rejected becomes a dead letter."""
        self._suspects += self._undelivered
        self._undelivered.clear()
        while self._suspects:
            _, record = self._suspects[0]
            self._producer.produce(record.topic(), record.value(), record.key())
            if self._producer.flush(_FLUSH_SECONDS):
                raise self._busy("no answer")
            refusals = [error for error, _ in self._undelivered]
            self._undelivered.clear()  # otherwise it is sent twice if its dead letter cannot be stored at present
            for error in refusals:
                if error.name() not in RECORDS_FAULT:
                    self._lost = error.str()
                    raise self._busy(self._lost)
                failure = Failure(self._context.component, f"Kafka rejects the record: {error.str()}")
                dead_letter = (record.topic(), record.key(), record.value())
                self._context.add_dead_letters([dead_letter], failure)
            self._suspects.pop(0)

    def _rejected(self, error: Exception) -> ComponentError:
        return ComponentError(
            f"{self._where}, Kafka at {self._bootstrap}",
            f"a row cannot become a record ({type(error).__name__}: {error})",
            "Correct the row in a bolt before this one, or topic= and value=.",
        )

    def _busy(self, got: str) -> SinkBusy:
        return SinkBusy(
            f"{self._where}, Kafka at {self._bootstrap}",
            f"Kafka did not accept every record ({got})",
            "Check that the topic exists and that the brokers are running and have space. No records are lost.",
        )
