"""A bolt that writes tuples to Kafka, at least once."""

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

_FLUSH_SECONDS = 2.0  # for which a commit blocks its worker, at most


class KafkaBolt(TransactionalSink):
    """Writes each tuple as a record. At least once: a tuple is acked when Kafka has its record, so after a failure
    some records are there twice; consumers see records before their epoch is committed. For exactly once take
    ``KafkaSink``.

    The topic is fixed or a function of the row (a dict); the key is a field; the value is a field, a function of
    the row, the only field, or the row as JSON. Records with one key stay in order, whatever the network does.
    """

    commit_interval = 0.1  # seconds; a flush is quick, and 50,000 tuples under way then allow 500,000 a second

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
        """``timeout``: seconds Kafka may take to accept a record; longer than a broker's restart, shorter than the
        20 s after which a silent worker counts as dead. ``options`` are librdkafka's, for security and tuning."""
        self._encoder = Encoder("KafkaBolt", topic, key_field, value_field, value)
        self._bootstrap, self._timeout, self._options = bootstrap, timeout, dict(options)

    def prepare(self, conf: Conf, context: Context) -> None:
        self._context = context
        self._where = where(context.component, context.task)
        self._written: list[pa.RecordBatch] = []
        """Since the last commit. What Kafka did not take is produced again."""
        self._lost = ""
        """Why all of it has to be."""
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
                "delivery.report.only.error": True,  # a callback for each record would halve the speed
                "on_delivery": lambda error, message: undelivered.append((error, message)),
                "error_cb": self.errors.note,
                "linger.ms": 5,
                "log_level": 2,
                **self._options,
            }
        )

    def recover(self, tokens: Sequence[Any]) -> None:
        """Nothing waits for a commit."""

    def write(self, batch: pa.RecordBatch, source: Source) -> None:
        """Where it raises some of the records may be on their way: they come again."""
        try:
            produce(self._producer, self._encoder.records(batch, self._where), self._timeout)
        except BufferError:
            raise self._busy(f"its queue is full and has not moved for {self._timeout:.0f} s") from None
        except client_library().KafkaException as failed:
            if failed.args[0].name() not in RECORDS_FAULT:
                raise
            raise self._rejected(failed) from failed
        except (PenstockError, OSError):
            raise
        except Exception as failed:  # topic= and value= are the user's; the library checks what they return
            raise self._rejected(failed) from failed
        self._written.append(batch)
        self._producer.poll(0)

    def prepare_commit(self, epoch: int) -> Any:
        """Wait until Kafka has everything, for a moment; then ``SinkBusy`` is raised, and the next call goes on. A
        record that Kafka rejects for good is a dead letter."""
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
        except ComponentError as hopeless:  # for this producer; a person may mend it
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
        """Nothing: the records are visible already."""

    def cleanup(self) -> None:
        self._producer.flush(self._timeout + 1.0)

    def _produce_again(self) -> None:
        """All since the last commit, with another producer: of this one nobody knows what it has sent."""
        self._producer.purge()
        self._start()
        for batch in self._written:
            try:
                produce(self._producer, self._encoder.records(batch, self._where), self._timeout)
            except BufferError:
                raise self._busy("its queue is full") from None
        self._lost = ""

    def _store_rejected(self) -> None:
        """Kafka rejects records that it got together as one: each is offered once more alone. One that is rejected
        then is a dead letter."""
        self._suspects += self._undelivered
        self._undelivered.clear()
        while self._suspects:
            _, record = self._suspects[0]
            self._producer.produce(record.topic(), record.value(), record.key())
            if self._producer.flush(_FLUSH_SECONDS):
                raise self._busy("no answer")
            refusals = [error for error, _ in self._undelivered]
            self._undelivered.clear()  # else it is offered twice where its dead letter cannot be stored now
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
            "Check that the topic exists and that the brokers run and have space. Nothing is lost meanwhile.",
        )
