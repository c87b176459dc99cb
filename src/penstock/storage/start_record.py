"""Where a spout began to read, durable before its first tuple.

A start such as "at the end" is another place each time it is looked up. Until the task's first snapshot is
committed, the place that was found is in no committed state: a process that crashes in between would look it up
again and skip everything that was written meanwhile. So the place is written to the task's folder first, and a
later process of the task takes it from there. A position in the task's state is always preferred.
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
"""In the task's folder. ``StateDirectory.clear`` removes it with everything that was committed."""


class StartRecord:
    """The start positions of one task: any JSON object. Made in ``open``; calls come from the task's thread.

    At most once, and for a task without a folder, nothing is kept.
    """

    def __init__(self, context: Context) -> None:
        self._folder = context.folder if context.delivery != "at_most_once" else ""
        self._commits = 0
        self._there = False

    @cached_property
    def _store(self) -> StateStore | None:
        """Opened at its first use: a spout with a fixed start never needs it."""
        return StateStore(self._folder) if self._folder else None

    def load(self) -> dict[str, Any]:
        """What an earlier process of this task kept; empty where there is nothing of use."""
        if self._store is None:
            return {}
        try:
            found = parse_json(self._store.read(START_FILE))
        except StateError as error:
            if is_missing(error):
                return {}
            raise
        except ValueError:  # half a file, on a store whose writes are not atomic: then no tuple was emitted
            return {}
        self._there = isinstance(found, dict)
        return found if isinstance(found, dict) else {}

    def keep(self, positions: dict[str, Any]) -> None:
        """Durable on return."""
        if self._store is not None:
            self._store.write(START_FILE, json.dumps(positions).encode())
            self._there = True

    def on_committed(self) -> None:
        """A snapshot of the task is committed. After two of them, for a restart may take the one before the
        newest, the positions are in the state and the record goes."""
        if self._there and self._store is not None:
            self._commits += 1
            if self._commits >= 2:
                with contextlib.suppress(StateError):  # it does no harm: the next commit tries again
                    self._store.remove(START_FILE)
                    self._there = False
