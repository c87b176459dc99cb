"""What the replay queues hold, and how it is written down.

Plain values (texts, numbers, bytes, lists and dicts of them) are written as JSON, so that a queue can be read by
other programs and by other versions of Python. Whatever else a tuple holds is pickled: to the type, what comes
back is what failed. Unpickling runs code, and others may write to a shared topic or folder: a pickled record is
signed with the deployment key, and one whose signature is missing or wrong is never unpickled.

A record that cannot be read is not lost and stops no other: it becomes a *damaged* record, which holds the bytes
as they were found and what is wrong with them, and goes to the dead letters.
"""

from __future__ import annotations

import json
import pickle
from typing import Any, NamedTuple

from penstock import signing
from penstock.errors import EnvironmentFault
from penstock.texts import parse_json
from penstock.topology.components import Failure

_JSON, _PICKLE = b"J", b"P"
_PURPOSE = "replay record"  # of a signature
_SCALARS = frozenset({str, int, float, bool, type(None)})
_FLAT = _SCALARS | {bytes}
_STORY: tuple[Any, ...] = (int, str, str, (int, float))  # the types of what follows the values


class ReplayRecord(NamedTuple):  # one is made for every tuple read: four times as quick as a frozen dataclass
    """A tuple in a replay queue, with the story of its failures."""

    payload: tuple[Any, ...]
    """The tuple's values, one per field; of a damaged record the bytes that were found."""
    attempts: int = 0
    """How often it has failed."""
    error: str = ""
    """What was said the last time it failed."""
    component: str = ""
    """Where it failed the last time; empty for a time-out."""
    first_failed: float = 0.0
    """Wall time of its first failure, seconds; 0 for a tuple that never failed."""
    damaged: bool = False
    """It could not be read: ``error`` says why."""

    def failed(self, failure: Failure, now: float) -> ReplayRecord:
        """The record after one more failure."""
        return self._replace(
            attempts=self.attempts + 1,
            error=failure.error,
            component=failure.component,
            first_failed=self.first_failed or now,
        )

    def forgiven(self) -> ReplayRecord:
        """The record with its attempts counted from zero again; its story stays readable."""
        return self._replace(attempts=0)


def encode(record: ReplayRecord) -> bytes:
    """A record as bytes, for a queue; of a damaged one those that were found, so that it is read once more. Raises
    what pickle raises where a value is neither plain nor picklable."""
    if record.damaged:
        return record.payload[0] or _JSON  # a log holds no empty record; a lone mark cannot be read either
    return _encode(record, (record.attempts, record.error, record.component, record.first_failed))


def decode(data: bytes | None) -> ReplayRecord:
    """The record ``encode`` made these bytes of, or a damaged record. None: a Kafka record without a value."""
    return _decode(data, 4)


def encode_dead_letter(record: ReplayRecord) -> bytes:
    """As ``encode``, for a store of dead letters, where a damaged record stays known as one."""
    if not record.damaged:
        return encode(record)
    return _encode(record, record[1:])


def decode_dead_letter(data: bytes | None) -> ReplayRecord:
    """The record ``encode_dead_letter`` made these bytes of, or a damaged record."""
    return _decode(data, 5)


def _encode(record: ReplayRecord, story: tuple[Any, ...]) -> bytes:
    values = record.payload
    kinds = set(map(type, values))
    if kinds <= _FLAT or all(type(value) is bytes or _plain(value) for value in values):
        raw: list[int] = []
        if bytes in kinds:  # JSON has none: each byte becomes the character of its number
            raw = [index for index, value in enumerate(values) if type(value) is bytes]
            values = tuple(v.decode("latin-1") if type(v) is bytes else v for v in values)
        try:
            text = json.dumps((values, raw, *story), ensure_ascii=False, separators=(",", ":"))
            return _JSON + text.encode("utf-8", "surrogatepass")
        except (ValueError, RecursionError):  # an integer of more than 4,300 digits; lists a thousand deep
            pass
    pickled = pickle.dumps((record.payload, *story), 5)
    return _PICKLE + signing.sign(_PURPOSE, pickled) + pickled


def _decode(data: bytes | None, most: int) -> ReplayRecord:
    """``most``: how many parts of a record's story there may be."""
    if data is None:
        return _damaged(b"", "the record has no value (a Kafka tombstone)")
    try:
        if data[:1] == _PICKLE:
            found = _unpickled(data[1:])
        elif data[:1] == _JSON:
            values, raw, *story = parse_json(data[1:].decode("utf-8", "surrogatepass"))
            if type(values) is not list:
                raise ValueError("the values are not a list")
            for index in raw:
                values[index] = values[index].encode("latin-1")
            found = (tuple(values), *story)
        else:
            raise ValueError("neither JSON nor a signed pickle as penstock writes it")
        payload, *story = found
        if type(payload) is not tuple or not 4 <= len(story) <= most:
            raise ValueError("it has other parts than a record")
        for part, kind in zip(story, _STORY, strict=False):
            if not isinstance(part, kind):
                raise ValueError(f"{type(part).__name__} in the place of {kind}")
        return ReplayRecord(payload, *story)
    except EnvironmentFault:  # of the key file: that is mended, not the record
        raise
    except Exception as error:  # bytes that anyone may have written; and whatever a user's class raises
        return _damaged(bytes(data), f"{type(error).__name__}: {error}")


def _unpickled(data: bytes) -> tuple[Any, ...]:
    signature, pickled = data[: signing.SIGNATURE_BYTES], data[signing.SIGNATURE_BYTES :]
    if not signing.is_signed(_PURPOSE, pickled, signature):
        raise ValueError("it is pickled and not signed with this deployment's key, so it is not unpickled")
    found: tuple[Any, ...] = pickle.loads(pickled)
    return found


def _damaged(data: bytes, error: str) -> ReplayRecord:
    return ReplayRecord((data,), error=error, damaged=True)


def _plain(value: Any) -> bool:
    """True where JSON gives the value back as it is, to the type."""
    kind = type(value)
    if kind is list:
        return all(map(_plain, value))
    if kind is dict:
        return all(type(key) is str and _plain(item) for key, item in value.items())
    return kind in _SCALARS
