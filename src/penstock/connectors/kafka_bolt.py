"""A bolt that writes tuples to Kafka, at least once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Any

import pyarrow as pa

from penstock.connectors.kafka_client import BrokerErrors, Options, client_library, where
from penstock.connectors.kafka_encoding import Encoder, Payload, Row, produce
from penstock.errors import ComponentError
from penstock.topology.components import Conf, Context, Source, TransactionalSink


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
        20 s after which a silent slot counts as dead. ``options`` are librdkafka's, for security and tuning."""
        self._encoder = Encoder("KafkaBolt", topic, key_field, value_field, value)
        self._bootstrap, self._timeout, self._options = bootstrap, timeout, dict(options)

    def prepare(self, conf: Conf, context: Context) -> None:
        self._where = where(context.component, context.task)
        self.errors = BrokerErrors(self._where, self._bootstrap)
        self._wrote = False
        self._lost: ComponentError | None = None
        self._start()

    def _start(self) -> None:
        undelivered: list[str] = []
        self._undelivered = undelivered
        self._producer = client_library().Producer(
            {
                "bootstrap.servers": self._bootstrap,
                "enable.idempotence": True,
                "message.timeout.ms": int(self._timeout * 1000),
                "delivery.report.only.error": True,  # a callback for each record would halve the speed
                "on_delivery": lambda error, message: undelivered.append(error.str()),
                "error_cb": self.errors.note,
                "linger.ms": 5,
                "log_level": 2,
                **self._options,
            }
        )

    def recover(self, tokens: Sequence[Any]) -> None:
        """Nothing waits for a commit."""

    def write(self, batch: pa.RecordBatch, source: Source) -> None:
        """Raises also on behalf of earlier batches, whose records are dropped with this one's: ``prepare_commit``
        will say so again. What is written in between goes its way, and comes again."""
        self._wrote = True
        try:
            produce(self._producer, self._encoder.records(batch, self._where), self._timeout)
        except BufferError:
            self._lost = self._failure(f"its queue is full and has not moved for {self._timeout:.0f} s")
            raise self._lost from None
        self._producer.poll(0)
        try:
            self._check()
        except ComponentError as lost:
            self._lost = lost
            raise

    def prepare_commit(self, epoch: int) -> Any:
        """Wait until Kafka has everything. Raises if it does not take it, also if ``write`` said so before: none
        of the tuples since the last call are acked then."""
        if self._lost is not None:
            lost, self._lost = self._lost, None
            raise lost
        left = self._producer.flush(self._timeout + 1.0)  # by then each record is delivered or has timed out
        if left:
            self._undelivered.append("no answer")
        self._check()
        if self._wrote:  # else nobody asked Kafka anything
            self.errors.clear()
            self._wrote = False

    def commit(self, token: Any) -> None:
        """Nothing: the records are visible already."""

    def cleanup(self) -> None:
        self._producer.flush(self._timeout + 1.0)

    def _check(self) -> None:
        self.errors.check()
        if self._undelivered:
            raise self._failure(f"{len(self._undelivered)} not accepted: {self._undelivered[0]}")

    def _failure(self, got: str) -> ComponentError:
        """Records still queued are dropped, with the producer that has them: their tuples come again."""
        self._producer.purge()
        self._start()
        return ComponentError(
            f"{self._where}, Kafka at {self._bootstrap}",
            f"Kafka accepts each record within {self._timeout:.0f} s",
            got,
            "Check that the topic exists and that the brokers run and have space.",
        )
