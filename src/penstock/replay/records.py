"""The records of replay queues, and their encoding.

Plain values (texts, numbers, bytes, lists and dicts of them) are encoded as JSON, so that other programs and other
versions of Python can read a queue. Other values are pickled, which preserves their types. Unpickling runs code,
and other programs may write to a shared topic or folder; therefore a pickled record is signed with the deployment
key, and a record without a valid signature is never unpickled.

A record that cannot be read becomes a *damaged* record. It contains the bytes that were found and the error, and
goes to the dead letters. Other records are not affected. A tuple that failed and can no longer be read where it
was read is *lost*: a damaged record with the position instead of the bytes.
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
_PURPOSE = "replay record"  # part of what is signed, so that a signature is valid for this purpose only
_SCALARS = frozenset({str, int, float, bool, type(None)})
_FLAT = _SCALARS | {bytes}
_HISTORY: tuple[Any, ...] = (int, str, str, (int, float))  # the types of the parts that follow the values


class ReplayRecord(NamedTuple):  # created for every tuple: four times as fast as a frozen dataclass
    """A tuple in a replay queue, with the history of its failures."""

    payload: tuple[Any, ...]
    """The values of the tuple, one per field; for a damaged record, the bytes that were found."""
    attempts: int = 0
    """The number of times it has failed."""
    error: str = ""
    """The error of the last failure."""
    component: str = ""
    """The component of the last failure; empty for a timeout."""
    first_failed: float = 0.0
    """Wall-clock time of the first failure in seconds; 0 for a tuple that never failed."""
    damaged: bool = False
    """True if the record could not be read; ``error`` contains the reason."""

    def failed(self, failure: Failure, now: float) -> ReplayRecord:
        """The record after one more failure. A tuple that was handed on has not failed."""
        if failure.handed_on:
            return self
        return self._replace(
            attempts=self.attempts + 1,
            error=failure.error,
            component=failure.component,
            first_failed=self.first_failed or now,
        )

    def reset(self) -> ReplayRecord:
        """The record with its attempts reset to zero. The other parts of its history are kept."""
        return self._replace(attempts=0)


def lost(position: str, reason: str) -> ReplayRecord:
    """The record of a tuple that can no longer be read at a position."""
    error = f"{position} can no longer be read: {reason}"
    return ReplayRecord((position.encode(),), error=error, damaged=True)


def encode(record: ReplayRecord) -> bytes:
    """The bytes of a record, for a queue. A damaged record is encoded as the bytes that were found, so that it is
    read once more. Raises what pickle raises if a value is neither plain nor picklable."""
    if record.damaged:
        return record.payload[0] or _JSON  # a log cannot contain an empty record; this one is damaged as well
    return _encode(record, (record.attempts, record.error, record.component, record.first_failed))


def decode(data: bytes | None) -> ReplayRecord:
    """The record that ``encode`` encoded, or a damaged record. None stands for a Kafka record without a value."""
    return _decode(data, 4)


def encode_dead_letter(record: ReplayRecord) -> bytes:
    """Like ``encode``, for a store of dead letters: a damaged record remains marked as damaged."""
    if not record.damaged:
        return encode(record)
    return _encode(record, record[1:])


def decode_dead_letter(data: bytes | None) -> ReplayRecord:
    """The record that ``encode_dead_letter`` encoded, or a damaged record."""
    return _decode(data, 5)


def _encode(record: ReplayRecord, history: tuple[Any, ...]) -> bytes:
    values = record.payload
    kinds = set(map(type, values))
    if kinds <= _FLAT or all(type(value) is bytes or _plain(value) for value in values):
        raw: list[int] = []
        if bytes in kinds:  # JSON has no bytes: each byte becomes the character with its number
            raw = [index for index, value in enumerate(values) if type(value) is bytes]
            values = tuple(v.decode("latin-1") if type(v) is bytes else v for v in values)
        try:
            text = json.dumps((values, raw, *history), ensure_ascii=False, separators=(",", ":"))
            return _JSON + text.encode("utf-8", "surrogatepass")
        except (ValueError, RecursionError):  # an integer with more than 4,300 digits, or very deep nesting
            pass
    pickled = pickle.dumps((record.payload, *history), 5)
    return _PICKLE + signing.sign(_PURPOSE, pickled) + pickled


def _decode(data: bytes | None, most: int) -> ReplayRecord:
    """``most`` is the maximum number of parts of a record's history."""
    if data is None:
        return _damaged(b"", "the record has no value (a Kafka tombstone)")
    try:
        if data[:1] == _PICKLE:
            found = _unpickled(data[1:])
        elif data[:1] == _JSON:
            values, raw, *history = parse_json(data[1:].decode("utf-8", "surrogatepass"))
            if type(values) is not list:
                raise ValueError("the values are not a list")
            for index in raw:
                values[index] = values[index].encode("latin-1")
            found = (tuple(values), *history)
        else:
            raise ValueError("it is neither JSON nor a signed pickle in Penstock's format")
        payload, *history = found
        if type(payload) is not tuple or not 4 <= len(history) <= most:
            raise ValueError("its parts are not those of a record")
        for part, kind in zip(history, _HISTORY, strict=False):
            if not isinstance(part, kind):
                raise ValueError(f"it contains {type(part).__name__} instead of {kind}")
        return ReplayRecord(payload, *history)
    except EnvironmentFault:  # about the key file: this can be corrected, and the record is not damaged
        raise
    except Exception as error:  # the bytes may have any origin, and users' classes may raise anything
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
    """True if JSON restores the value with its exact type."""
    kind = type(value)
    if kind is list:
        return all(map(_plain, value))
    if kind is dict:
        return all(type(key) is str and _plain(item) for key, item in value.items())
    return kind in _SCALARS
