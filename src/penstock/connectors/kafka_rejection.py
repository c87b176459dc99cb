"""Which records Kafka will never take, and which errors say so.

A broker answers for a batch of records, not for each: with one record that is too large the others in its batch
fail too. So an error of the first kind below only makes a record a suspect. It is rejected when Kafka refuses it
alone.

- About the record: its size (MSG_SIZE_TOO_LARGE, RECORD_LIST_TOO_LARGE, INVALID_MSG_SIZE), its content
  (INVALID_RECORD, INVALID_MSG: no key in a compacted topic, for example), a name that no topic can have
  (TOPIC_EXCEPTION). It is offered alone, and is a dead letter if it is refused again.
- Waited for, since a person or time mends it and the same record is accepted then: a topic or partition that does
  not exist yet, missing rights (TOPIC_AUTHORIZATION_FAILED and the like), INVALID_TIMESTAMP (the client's clock is
  wrong; the rows bring no timestamps), quotas, time-outs, no leader, too few replicas, brokers that are away.
- Fenced or fatal: ``SinkRefused``, and the process is replaced.
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
        "_INVALID_DIFFERENT_RECORD",  # librdkafka's: another record of the batch was invalid
        "TOPIC_EXCEPTION",
    }
)
"""Errors, by Kafka's names, that are about records."""
_MOST_GROUP = 1_000_000  # bytes; librdkafka's default of batch.size
_OVERHEAD = 100  # bytes of a record beside key and value, at most

Content: TypeAlias = tuple[str, bytes | None, bytes | None]
"""⟨topic, value, key⟩. Kafka treats records with the same content alike, so this names them."""


def content_of(record: Record) -> Content:
    return record[0], _bytes(record[1]), _bytes(record[2])


class RecordSearch:
    """Of one epoch. Offer ``piece`` to Kafka, say what came of it, until there is none left. What was found stays
    when a call ends for lack of time: the next one goes on with it."""

    def __init__(self) -> None:
        self.rejected: dict[Content, str] = {}
        """Records that Kafka refuses alone, and what it says."""
        self.group_bytes: int | None = None
        """How many bytes may go to Kafka together; None: as the client library does it."""
        self._todo: list[list[Content]] = []
        self._found = False

    def suspect(self, contents: Iterable[Content]) -> None:
        """Kafka refused them, together with others or not."""
        self._todo = [list(dict.fromkeys(contents))]
        self._found = False

    @property
    def piece(self) -> list[Content] | None:
        """The records to offer next, in a transaction that is aborted afterwards."""
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
        if not self._todo and not self._found:  # each is accepted alone: their batch is what was too large
            self.group_bytes = max(1, (self.group_bytes or _MOST_GROUP) // 2)


def groups(records: Iterable[Record], most: int) -> Iterator[list[Record]]:
    """The records in order, in lists of at most ``most`` bytes; a larger record is a list of its own."""
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
