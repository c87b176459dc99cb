"""Where results end up, written in bulk by the processor.

``tests/contract/test_persist_stores.py`` is what one of your own must pass.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TypeAlias

import pyarrow as pa

from penstock.errors import ComponentError, TopologyError
from penstock.storage.tables import Rejected


class StoreUnavailable(ComponentError):
    """The store refuses, hangs or is full: the same rows may be taken later. Nothing, or everything, of what was
    asked has happened."""


class Overtaken(ComponentError):
    """Another processor has written for this queue since the progress was read. Nothing was written."""


Reject: TypeAlias = Callable[[Sequence[Rejected]], None]


class Store(ABC):
    """What the user makes on the driver; pickled, and opened in the processor's process. Without a ``key`` rows
    are appended. With one a row replaces the row of the same key: after all writes a key's row is the one that
    was put last."""

    key: tuple[str, ...]

    @abstractmethod
    def check(self, where: str) -> None:
        """Raise a ``PenstockError`` if it can never be opened with this installation: a missing library. Looks at
        nothing outside the process."""

    @abstractmethod
    def open(self) -> StoreClient:
        """Does not need to reach a server yet."""

    @abstractmethod
    def __str__(self) -> str:
        """For people: what it is and where, without passwords."""


class StoreClient(ABC):
    """The processor's hold on a store. All calls come from one thread. Any call but ``close`` may raise
    ``StoreUnavailable``, and may then be repeated: connections are made anew by then."""

    @abstractmethod
    def progress(self, queue: str) -> str:
        """What the newest write for this queue recorded; empty before the first."""

    @abstractmethod
    def write(self, queue: str, rows: pa.Table, before: str, after: str, reject: Reject) -> None:
        """In one step, all or nothing: write the rows, and record ``after`` as the queue's progress in place of
        ``before``. Raises ``Overtaken`` if what is recorded is not ``before``, even if another process changes it
        at this moment. May be asked for no rows.

        Rows the store will never take (a type, a constraint) are handed to ``reject`` once, all together, before
        the step is done, and left out; all others are written, those of one key in order.
        """

    @abstractmethod
    def close(self) -> None:
        """Let go of connections. Never raises ``StoreUnavailable``."""


def checked_key(where: str, key: Sequence[str]) -> tuple[str, ...]:
    """The key as a store keeps it."""
    if isinstance(key, str) or len(set(key)) != len(tuple(key)):
        raise TopologyError(
            where, f"key is {key!r}, not a sequence of different fields", f"Write key=({key!r},) for one field."
        )
    return tuple(key)
