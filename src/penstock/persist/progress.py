"""How far a queue's entries are in the store. It is written there in one transaction with the rows, and so makes
every redelivery harmless: by a processor that died between the store's commit and the queue's release, by a writer
that did not hear whether its entry arrived."""

from __future__ import annotations

import json
from collections.abc import Mapping

from penstock.persist.entries import QueueEntry
from penstock.texts import parse_json


class WriteProgress:
    """The newest ⟨incarnation, number⟩ of each writer that is in the store. Anything not newer has been there: a
    queue takes nothing from an earlier incarnation once a later one is registered."""

    def __init__(self, newest: Mapping[str, tuple[int, int]] | None = None) -> None:
        self._newest = dict(newest or {})

    def is_new(self, entry: QueueEntry) -> bool:
        newest = self._newest.get(entry.writer)
        return newest is None or newest < (entry.incarnation, entry.number)

    def take(self, entry: QueueEntry) -> None:
        """From now on this entry is known."""
        self._newest[entry.writer] = (entry.incarnation, entry.number)

    def with_all_of(self, other: WriteProgress) -> WriteProgress:
        """What either of the two knows."""
        newest = dict(self._newest)
        for writer, name in other._newest.items():
            newest[writer] = max(newest.get(writer, name), name)
        return WriteProgress(newest)

    def encode(self) -> str:
        return json.dumps(self._newest, sort_keys=True)

    @classmethod
    def decode(cls, text: str) -> WriteProgress:
        """From what ``encode`` gave; of an empty text, that of a store that has nothing."""
        return cls(
            {writer: (incarnation, number) for writer, (incarnation, number) in parse_json(text or "{}").items()}
        )
