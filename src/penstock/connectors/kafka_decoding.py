"""Converts Kafka records to Arrow columns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.connectors.kafka_client import BrokerErrors, client_library, log
from penstock.errors import TopologyError

PARTS = ("value", "key", "topic", "partition", "offset", "timestamp")
"""The parts of a record that can be emitted. ``timestamp`` is in milliseconds since 1970."""


class Decoder:
    """Extracts parts of records. The value or key of a record is None if the record has none.

    Text that is not UTF-8 does not stop the stream: invalid bytes become U+FFFD, and such records are counted and
    logged.
    """

    def __init__(self, fields: Mapping[str, str], decode: str) -> None:
        """``fields`` maps field names to parts of a record; ``decode`` is "text" or "bytes"."""
        if not fields or any(part not in PARTS for part in fields.values()):
            raise TopologyError(
                "KafkaSpout",
                f"fields is {dict(fields)!r}, and every value must be a part of a record: " + ", ".join(PARTS),
                'For example fields={"line": "value", "user": "key"}.',
            )
        if decode not in ("text", "bytes"):
            raise TopologyError("KafkaSpout", f'decode is {decode!r}, neither "text" nor "bytes"')
        payload = pa.string() if decode == "text" else pa.binary()
        types = {"value": payload, "key": payload, "topic": pa.string()}
        self._parts = list(fields.values())
        self.schema: pa.Schema = pa.schema([(name, types.get(part, pa.int64())) for name, part in fields.items()])

    def open(self, where: str, errors: BrokerErrors) -> None:
        """Called once, in the task's process."""
        self._where, self._errors, self._message = where, errors, client_library().Message

    def rows(self, messages: list[Any], offsets: npt.NDArray[np.int64]) -> pa.RecordBatch:
        """The messages as a batch. None of them may be an error."""
        columns = [
            self._column(part, field.type, messages, offsets)
            for part, field in zip(self._parts, self.schema, strict=True)
        ]
        return pa.RecordBatch.from_arrays(columns, schema=self.schema)

    def _column(
        self, part: str, kind: pa.DataType, messages: list[Any], offsets: npt.NDArray[np.int64]
    ) -> pa.Array:
        if part == "offset":
            return pa.array(offsets)
        if part == "timestamp":
            return pa.array([each.timestamp()[1] for each in messages], kind)
        values = list(map(getattr(self._message, part), messages))
        try:
            return pa.array(values, kind)
        except pa.ArrowInvalid:  # a value is not UTF-8
            return self._replaced(values, messages)

    def _replaced(self, payloads: list[bytes | None], messages: list[Any]) -> pa.Array:
        texts = [None if payload is None else payload.decode(errors="replace") for payload in payloads]
        invalid = [row for row, text in enumerate(texts) if text is not None and text.encode() != payloads[row]]
        if not self._errors.counts["not text"]:
            first = messages[invalid[0]]
            log.warning(
                "%s: %s partition %d offset %d is not UTF-8, invalid bytes are replaced; try decode='bytes'",
                *(self._where, first.topic(), first.partition(), first.offset()),
            )
        self._errors.counts["not text"] += len(invalid)
        return pa.array(texts, pa.string())
