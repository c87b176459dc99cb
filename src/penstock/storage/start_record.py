"""Keeps the position at which a spout began to read, before the spout emits its first tuple.

A starting point such as "at the end" denotes a different position each time it is resolved. Until the task's first
snapshot is committed, the resolved position is not part of any committed state: if the process crashed, the next
one would resolve the starting point again and skip everything written in between. Therefore the position is first
written to the task's folder, and later processes of the task read it there. A position in the task's state takes
precedence.
"""

from __future__ import annotations

import contextlib
import json
from functools import cached_property
from typing import Any

from penstock.errors import StateError
from penstock.state.store import StateStore, is_missing
from penstock.texts import parse_json
from penstock.topology.components import Context

START_FILE = "start.json"
"""File name in the task's folder. ``StateDirectory.clear`` removes the file together with all committed state."""


class StartRecord:
    """The start positions of one task, as a JSON object. Create it in ``open``; call it from the task's thread
    only.

    It stores nothing with at-most-once delivery, nor for a task without a folder.
    """

    def __init__(self, context: Context) -> None:
        self._folder = context.folder if context.delivery != "at_most_once" else ""
        self._commits = 0
        self._exists = False

    @cached_property
    def _store(self) -> StateStore | None:
        """Opened when it is first used: a spout with a fixed starting point never needs it."""
        return StateStore(self._folder) if self._folder else None

    def load(self) -> dict[str, Any]:
        """The positions that an earlier process of this task kept; empty if there are none."""
        if self._store is None:
            return {}
        try:
            found = parse_json(self._store.read(START_FILE))
        except StateError as error:
            if is_missing(error):
                return {}
            raise
        except ValueError:  # a store whose writes are not atomic kept half a file: no tuple has been emitted yet
            return {}
        self._exists = isinstance(found, dict)
        return found if isinstance(found, dict) else {}

    def keep(self, positions: dict[str, Any]) -> None:
        """Store the positions. They are durable when the call returns."""
        if self._store is not None:
            self._store.write(START_FILE, json.dumps(positions).encode())
            self._exists = True

    def on_committed(self) -> None:
        """Called after each commit of a snapshot of the task. The second call removes the record: a restart may
        use the snapshot before the newest one, so the positions must be in two committed snapshots."""
        if self._exists and self._store is not None:
            self._commits += 1
            if self._commits >= 2:
                with contextlib.suppress(StateError):  # a remaining file does no harm; the next commit tries again
                    self._store.remove(START_FILE)
                    self._exists = False
