"""Finds the records that Kafka will never accept.

A broker answers for a batch of records, not for each record: if one record is too large, the others in its batch
fail too. An error of the first kind below therefore only makes a record a suspect. It is rejected if Kafka refuses
it on its own.

- Errors about the record: its size (MSG_SIZE_TOO_LARGE, RECORD_LIST_TOO_LARGE, INVALID_MSG_SIZE), its content
  (INVALID_RECORD, INVALID_MSG, for example no key in a compacted topic), or an invalid topic name
  (TOPIC_EXCEPTION). The record is sent on its own and becomes a dead letter if it is refused again.
- Errors that time or an operator resolves, after which the same record is accepted: a topic or partition that does
  not exist yet, missing rights (TOPIC_AUTHORIZATION_FAILED and others), INVALID_TIMESTAMP (the client's clock is
  wrong; rows have no timestamps), quotas, timeouts, no leader, too few replicas, unreachable brokers. The sink
  retries.
- Fenced or fatal errors: the sink raises ``SinkRefused``, and the process is replaced.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeAlias

from penstock.connectors.kafka_encoding import Payload, Record

RECORDS_FAULT = frozenset(
    {
        "MSG_SIZE_TOO_LARGE",
        "RECORD_LIST_TOO_LARGE",
        "INVALID_MSG_SIZE",
        "INVALID_MSG",
        "INVALID_RECORD",
        "_INVALID_DIFFERENT_RECORD",  # librdkafka: another record of the batch was invalid
        "TOPIC_EXCEPTION",
    }
)
"""Names of the Kafka errors that are about records."""
_MOST_GROUP = 1_000_000  # bytes; librdkafka's default for batch.size
_OVERHEAD = 100  # bytes; upper bound of a record's size without key and value

Content: TypeAlias = tuple[str, bytes | None, bytes | None]
"""⟨topic, value, key⟩. Kafka treats records with the same content alike, so the content identifies them."""


def content_of(record: Record) -> Content:
    return record[0], _bytes(record[1]), _bytes(record[2])


class RecordSearch:
    """The search for rejected records in one epoch, by halving. The caller sends ``piece`` to Kafka and reports
    the outcome with ``on_accepted`` or ``on_refused`` until ``piece`` is None. Intermediate results are kept when
    a call of the sink runs out of time; the next call continues with them."""

    def __init__(self) -> None:
        self.rejected: dict[Content, str] = {}
        """Records that Kafka refuses on their own, with its error message."""
        self.group_bytes: int | None = None
        """The number of bytes that may be sent together; None leaves this to the client library."""
        self._todo: list[list[Content]] = []
        self._found = False

    def suspect(self, contents: Iterable[Content]) -> None:
        """Start a search among records that Kafka refused, possibly together with others."""
        self._todo = [list(dict.fromkeys(contents))]
        self._found = False

    @property
    def piece(self) -> list[Content] | None:
        """The records to send next, in a transaction that is aborted afterwards. None: the search is complete."""
        return self._todo[-1] if self._todo else None

    def on_accepted(self) -> None:
        self._todo.pop()
        self._done()

    def on_refused(self, error: str) -> None:
        piece = self._todo.pop()
        if len(piece) > 1:
            half = len(piece) // 2
            self._todo += [piece[half:], piece[:half]]
            return
        self.rejected[piece[0]] = error
        self._found = True
        self._done()

    def _done(self) -> None:
        if not self._todo and not self._found:  # each record is accepted on its own: the batch was too large
            self.group_bytes = max(1, (self.group_bytes or _MOST_GROUP) // 2)


def groups(records: Iterable[Record], most: int) -> Iterator[list[Record]]:
    """The records in order, in lists of at most ``most`` bytes. A larger record forms a list of its own."""
    group: list[Record] = []
    size = 0
    for record in records:
        _, value, key = content_of(record)
        more = len(value or b"") + len(key or b"") + _OVERHEAD
        if group and size + more > most:
            yield group
            group, size = [], 0
        group.append(record)
        size += more
    if group:
        yield group


def _bytes(part: Payload) -> bytes | None:
    return part.encode() if isinstance(part, str) else part
