"""The progress of a queue in the store. It is written in one transaction with the rows, so that repeated
deliveries have no effect: by a processor after one that died between the store's commit and the queue's release,
or by a writer that did not learn whether its entry arrived."""

from __future__ import annotations

import json
from collections.abc import Mapping

from penstock.persist.entries import QueueEntry
from penstock.texts import parse_json


class WriteProgress:
    """The newest ⟨incarnation, number⟩ of each writer in the store. An entry that is not newer has been written: a
    queue accepts nothing from an earlier incarnation once a later one is registered."""

    def __init__(self, newest: Mapping[str, tuple[int, int]] | None = None) -> None:
        self._newest = dict(newest or {})

    def is_new(self, entry: QueueEntry) -> bool:
        newest = self._newest.get(entry.writer)
        return newest is None or newest < (entry.incarnation, entry.number)

    def add(self, entry: QueueEntry) -> None:
        """Record that this entry is in the store."""
        self._newest[entry.writer] = (entry.incarnation, entry.number)

    def merged(self, other: WriteProgress) -> WriteProgress:
        """The progress that contains the entries of both."""
        newest = dict(self._newest)
        for writer, name in other._newest.items():
            newest[writer] = max(newest.get(writer, name), name)
        return WriteProgress(newest)

    def encode(self) -> str:
        return json.dumps(self._newest, sort_keys=True)

    @classmethod
    def decode(cls, text: str) -> WriteProgress:
        """The progress that ``encode`` encoded; an empty progress for an empty text."""
        return cls(
            {writer: (incarnation, number) for writer, (incarnation, number) in parse_json(text or "{}").items()}
        )
