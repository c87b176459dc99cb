"""Converts tuples to Kafka records and passes them to a producer."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import pyarrow as pa

from penstock.columns import is_pickled, to_values
from penstock.errors import ComponentError, TopologyError

Row: TypeAlias = Mapping[str, Any]
Payload: TypeAlias = str | bytes | None
Record: TypeAlias = tuple[str, Payload, Payload] | tuple[str, Payload, Payload, int]
"""⟨topic, value, key⟩ or ⟨topic, value, key, partition⟩, in the order of the client library's arguments."""


class Encoder:
    """Determines the topic, key and value of a record. Picklable; the functions are user code."""

    def __init__(
        self,
        name: str,
        topic: str | Callable[[Row], str],
        key_field: str | None,
        value_field: str | None,
        value: Callable[[Row], Payload] | None,
    ) -> None:
        """The value is the field ``value_field``, or the result of the function ``value``. Without either it is
        the only field besides the key, or else the whole row as JSON."""
        if not topic:
            raise TopologyError(
                name, f"the topic {topic!r} is neither a name nor a function of the row", "Name a topic."
            )
        if value_field is not None and value is not None:
            raise TopologyError(name, "value_field and value are both given", "Leave one of them out.")
        self._topic, self._key_field, self._value_field, self._value = topic, key_field, value_field, value

    def records(self, batch: pa.RecordBatch, where: str) -> Iterator[Record]:
        """One record per row. Strings and bytes are sent unchanged, None as a record without value (the tombstone
        of a compacted topic), everything else as JSON."""
        rows = _rows(batch) if callable(self._topic) or self._value is not None else []
        count = batch.num_rows
        topics = map(self._topic, rows) if callable(self._topic) else [self._topic] * count
        keys = [None] * count if self._key_field is None else self._payloads(batch, self._key_field, where)
        return zip(topics, self._values(batch, rows, where), keys, strict=True)

    def check(self, batch: pa.RecordBatch, where: str, largest: int) -> None:
        """Raise ``ComponentError`` if these rows cannot be encoded or the client library would not accept them.
        ``largest`` is the maximum size of key and value together, in bytes."""
        for topic, value, key, *_ in self._made(batch, where):
            if not isinstance(topic, str) or not topic:
                raise ComponentError(
                    where, f"the topic {topic!r} is not a name", "Let topic= return a name for each row."
                )
            if not isinstance(value, str | bytes | None):
                raise ComponentError(
                    where,
                    f"the record's value {value!r:.100} is of type {type(value).__name__}, not str, bytes or None",
                    "Let value= return one of these for each row.",
                )
            size = _size(value) + _size(key)
            if size > largest:
                raise ComponentError(
                    where,
                    f"a record for topic '{topic}' has {size} bytes of key and value, more than {largest}",
                    "Raise options={'message.max.bytes': ...}, and the topic's max.message.bytes with it.",
                )

    def _made(self, batch: pa.RecordBatch, where: str) -> Iterator[Record]:
        """The records. An exception of the user's functions becomes a ``ComponentError`` about the row."""
        try:
            for record in self.records(batch, where):
                for part in record[1:3]:
                    if isinstance(part, str):
                        part.encode()  # raises for an unpaired surrogate
                yield record
        except ComponentError:
            raise
        except Exception as error:  # user code may raise anything
            raise ComponentError(
                where,
                f"topic= or value= failed for a row ({type(error).__name__}: {error})",
                "Correct the function, or the row in a bolt before the sink.",
            ) from error

    def _values(self, batch: pa.RecordBatch, rows: list[dict[str, Any]], where: str) -> Iterable[Payload]:
        if self._value is not None:
            return map(self._value, rows)
        names = [name for name in batch.schema.names if name != self._key_field]
        if self._value_field is not None or len(names) == 1:
            return self._payloads(batch, self._value_field or names[0], where)
        return map(to_json, _rows(batch))

    def _payloads(self, batch: pa.RecordBatch, field: str, where: str) -> list[Payload]:
        if field not in batch.schema.names:
            raise ComponentError(
                where,
                f"the input has no field '{field}', only {', '.join(batch.schema.names)}",
                "Name one of these in key_field or value_field.",
            )
        column = batch.column(field)
        kind = column.type
        values = to_values(column)
        if pa.types.is_string(kind) or pa.types.is_binary(kind):
            return values
        return [value if value is None or isinstance(value, str | bytes) else to_json(value) for value in values]


def to_json(value: Any) -> str:
    """Compact JSON; values that JSON does not support (times, decimals) are written as their text."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=_text)


def _size(part: Payload) -> int:
    return 0 if part is None else len(part.encode() if isinstance(part, str) else part)


def _text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def _rows(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    if not any(map(is_pickled, batch.columns)):
        rows: list[dict[str, Any]] = batch.to_pylist()
        return rows
    columns = [to_values(column) for column in batch.columns]
    return [dict(zip(batch.schema.names, values, strict=True)) for values in zip(*columns, strict=True)]


def produce(producer: Any, records: Iterator[Record], seconds: float) -> int:
    """Append records to the producer's queue and return their number. While the queue is full this waits for
    Kafka, at most ``seconds`` for each record; then it raises ``BufferError``."""
    count = 0
    send = producer.produce
    for record in records:
        try:
            send(*record)
        except BufferError:
            _produce_when_free(producer, record, seconds)
        count += 1
    return count


def _produce_when_free(producer: Any, record: Record, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while True:
        producer.poll(0.05)
        try:
            producer.produce(*record)
            return
        except BufferError:
            if time.monotonic() > deadline:
                raise
