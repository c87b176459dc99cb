"""A slot's side of the state directory: restores its tasks and writes what they cut."""

from __future__ import annotations

from typing import Any

from penstock.faults import CrashPoint
from penstock.plan.model import SlotId
from penstock.runtime.slot import Restored, Slot, SlotCut
from penstock.state.snapshots import Part, SnapshotWriter, read_parts, snapshot_name
from penstock.state.store import StateStore

Entries = dict[str, dict[str, Any]]
"""Task key → ``{"parts": {state: [part]}, "tokens": [token]}``, as JSON."""


class SlotArchive:
    """Used by one thread at a time. ``generation`` tells the files of this start of the topology from those of
    others."""

    def __init__(self, folder: str, slot: SlotId, generation: int, crash: CrashPoint) -> None:
        self._store = StateStore(folder)
        self._writer = SnapshotWriter(self._store)
        self._slot, self._generation, self._crash = slot, generation, crash
        self._written = 0

    def restore(self, entries: Entries) -> dict[str, Restored]:
        """What the tasks begin with. Raises ``SnapshotCorrupt``."""
        chains = {
            key: {state: [Part.from_json(part) for part in parts] for state, parts in entry["parts"].items()}
            for key, entry in entries.items()
        }
        found = read_parts(self._store, chains)
        self._writer.adopt(chains)
        return {key: Restored(found[key], entry["tokens"]) for key, entry in entries.items()}

    def write(self, slot: Slot, cut: SlotCut) -> Entries:
        """Write what was cut (step 3 of a commit). Raises ``StateError``; then the tasks owe a full cut."""
        name = snapshot_name(cut.epoch, self._generation, self._slot.stage, self._slot.slot)
        self._written += 1  # at least once a slot with spouts and bolts writes twice in an epoch
        name = f"{name}-{self._written}"
        try:
            chains = self._writer.write(name, cut.cuts)
        except Exception:
            slot.owed |= set(cut.cuts)
            raise
        self._crash("written", cut.epoch)
        return {
            key: {
                "parts": {state: [part.to_json() for part in parts] for state, parts in chains[key].items()},
                "tokens": cut.tokens.get(key, []),
            }
            for key in cut.cuts
        }
