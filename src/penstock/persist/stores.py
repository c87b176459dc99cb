"""The interface of a store: the destination of results, to which the processor writes in bulk.

A custom implementation must pass ``tests/contract/test_persist_stores.py``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TypeAlias

import pyarrow as pa

from penstock.errors import ComponentError, TopologyError
from penstock.storage.tables import Rejected


class StoreUnavailable(ComponentError):
    """The store refuses, hangs or is full; the same rows may be accepted later. The operation was carried out
    completely or not at all."""


class Overtaken(ComponentError):
    """Another processor has written for this queue since the progress was read. Nothing was written."""


Reject: TypeAlias = Callable[[Sequence[Rejected]], None]


class Store(ABC):
    """The settings of a store: created by the user on the driver, pickled, and opened in the processor's process.
    Without a ``key``, rows are appended. With one, a row replaces the row with the same key, so that each key has
    the row that was put last."""

    key: tuple[str, ...]

    @abstractmethod
    def check(self, where: str) -> None:
        """Raise a ``PenstockError`` if the store can never be opened with this installation, for example because a
        library is missing. Accesses nothing outside the process."""

    @abstractmethod
    def open(self) -> StoreClient:
        """A client of the store. Need not connect to a server yet."""

    @abstractmethod
    def __str__(self) -> str:
        """What and where the store is, for people; without passwords."""


class StoreClient(ABC):
    """The processor's connection to a store. All calls come from one thread. Every method except ``close`` may
    raise ``StoreUnavailable`` and may then be called again; the client reconnects by itself."""

    @abstractmethod
    def progress(self, queue: str) -> str:
        """The progress that the newest write for this queue recorded; empty before the first."""

    @abstractmethod
    def write(self, queue: str, rows: pa.Table, before: str, after: str, reject: Reject) -> None:
        """Write the rows and replace the queue's progress ``before`` by ``after``, in one transaction. Raises
        ``Overtaken`` if the recorded progress is not ``before``, even if another process changes it at the same
        time. ``rows`` may be empty.

        Rows that the store will never accept (because of a type or a constraint) are passed to ``reject`` in one
        call before the transaction is committed, and are left out. All others are written, those of one key in
        order.
        """

    @abstractmethod
    def close(self) -> None:
        """Close connections. Never raises ``StoreUnavailable``."""


def checked_key(where: str, key: Sequence[str]) -> tuple[str, ...]:
    """The key as a tuple. Raises ``TopologyError`` if it is not a sequence of different fields."""
    if isinstance(key, str) or len(set(key)) != len(tuple(key)):
        raise TopologyError(
            where, f"key is {key!r}, not a sequence of different fields", f"Write key=({key!r},) for one field."
        )
    return tuple(key)
