"""What the replay queues hold, and how it is written down.

Plain values (texts, numbers, bytes, lists and dicts of them) are written as JSON, so that a queue can be read by
other programs and by other versions of Python. Whatever else a tuple holds is pickled: to the type, what comes
back is what failed.
"""

from __future__ import annotations

import json
import pickle
from typing import Any, NamedTuple

from penstock.errors import EnvironmentFault
from penstock.topology.components import Failure


class QueueDamaged(EnvironmentFault):
    """What was stored does not read back as it was written."""


_JSON, _PICKLE = b"J", b"P"
_SCALARS = frozenset({str, int, float, bool, type(None)})
_FLAT = _SCALARS | {bytes}


class Record(NamedTuple):  # one is made for every tuple read: four times as quick as a frozen dataclass
    """A tuple in a replay queue, with the story of its failures."""

    payload: tuple[Any, ...]
    """The tuple's values, one per field."""
    attempts: int = 0
    """How often it has failed."""
    error: str = ""
    """What was said the last time it failed."""
    component: str = ""
    """Where it failed the last time; empty for a time-out."""
    first_failed: float = 0.0
    """Wall time of its first failure, seconds; 0 for a tuple that never failed."""

    def failed(self, failure: Failure, now: float) -> Record:
        """The record after one more failure."""
        return self._replace(
            attempts=self.attempts + 1,
            error=failure.error,
            component=failure.component,
            first_failed=self.first_failed or now,
        )

    def forgiven(self) -> Record:
        """The record with its attempts counted from zero again; its story stays readable."""
        return self._replace(attempts=0)


def encode(record: Record) -> bytes:
    """A record as bytes. Raises what pickle raises where a value is neither plain nor picklable."""
    story = (record.attempts, record.error, record.component, record.first_failed)
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
        except ValueError:  # an integer of more than 4,300 digits
            pass
    return _PICKLE + pickle.dumps((record.payload, *story), 5)


def decode(data: bytes) -> Record:
    """The record ``encode`` made these bytes of. Unpickles: the queues are as trusted as the topology's code.
    Raises ``QueueDamaged`` where that fails."""
    if data[:1] == _PICKLE:
        try:
            return Record(*pickle.loads(data[1:]))
        except Exception as error:  # whatever a user's class raises while it is built
            raise QueueDamaged(
                "replay queue",
                "a tuple must unpickle with the code the topology has now",
                f"{type(error).__name__}: {error}",
                "Bring back the class it names, or emit plain values.",
            ) from error
    values, raw, *story = json.loads(data[1:].decode("utf-8", "surrogatepass"))
    for index in raw:
        values[index] = values[index].encode("latin-1")
    return Record(tuple(values), *story)


def _plain(value: Any) -> bool:
    """True where JSON gives the value back as it is, to the type."""
    kind = type(value)
    if kind is list:
        return all(map(_plain, value))
    if kind is dict:
        return all(type(key) is str and _plain(item) for key, item in value.items())
    return kind in _SCALARS
