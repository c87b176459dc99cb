"""The state directory as a start of the topology finds it: which epoch it begins with, and what its tasks had.

The newest manifest decides. What later epochs wrote was never committed and goes.
"""

from __future__ import annotations

import logging
from typing import Any

from penstock.errors import StateError
from penstock.plan.model import Plan
from penstock.state import manifest as manifests
from penstock.state.manifest import Manifest
from penstock.state.store import StateStore
from penstock.topology.builder import Topology

log = logging.getLogger("penstock.recovery")


class StateDirectory:
    """A topology's own folder in the state directory."""

    def __init__(self, plan: Plan, topology: Topology, folder: str | None = None) -> None:
        self.store = StateStore(folder or topology.settings.state_dir).child(topology.name)
        self.generation = 0
        self._plan = plan
        self._manifest: Manifest | None = None

    @property
    def epoch(self) -> int:
        """The committed epoch to begin with; 0: from nothing."""
        return 0 if self._manifest is None else self._manifest.epoch

    def recover(self) -> None:
        """Take the directory over, and find what to begin with. Raises ``StateError`` where that does not fit the
        topology."""
        self.generation = manifests.claim(self.store)
        self._manifest = manifests.newest(self.store)
        manifests.clear_later(self.store, self.epoch)
        if self._manifest is not None:
            self._check(self._manifest)
            log.info("topology '%s' goes on from epoch %d", self._plan.topology, self.epoch)

    def tasks(self) -> dict[str, Any]:
        """What the manifest says of each task, as JSON, by task key."""
        if self._manifest is None:
            return {}
        return {
            key: {
                "parts": {state: [part.to_json() for part in chain] for state, chain in entry.parts.items()},
                "tokens": entry.tokens,
            }
            for key, entry in self._manifest.tasks.items()
        }

    def fall_back(self, error: str) -> None:
        """The epoch's snapshots cannot be read: take it back, so that the next ``recover`` finds the one before.
        Raises ``StateError`` where there is none."""
        before = manifests.newest(self.store, before=self.epoch)
        if before is None:
            raise StateError(
                f"topology '{self._plan.topology}'", "needs a readable snapshot, and there is no other", error
            )
        log.error(
            "%s FALLING BACK from epoch %d to epoch %d: what was done in between is done again, and sinks that "
            "published it will hold it twice.",
            error,
            self.epoch,
            before.epoch,
        )
        manifests.discard_after(self.store, before.epoch)

    def clear(self) -> None:
        """Begin from nothing: forget all that was committed."""
        manifests.claim(self.store)
        manifests.discard_after(self.store, 0)
        manifests.clear_later(self.store, 0)

    def adopt(self, savepoint: StateStore) -> int:
        """Begin from a savepoint instead of what is here; returns its epoch."""
        found = manifests.newest(savepoint)
        if found is None:
            raise StateError(f"savepoint {savepoint.url}", "must hold a manifest", "none", "Check the path.")
        self._check(found)
        self.clear()
        manifests.copy(savepoint, found, self.store)
        return found.epoch

    def _check(self, manifest: Manifest) -> None:
        """State is kept by component and task: both must still be there."""
        here = {component: len(tasks) for component, tasks in self._plan.tasks_of.items()}
        kept = {key.partition("/")[0] for key, entry in manifest.tasks.items() if entry.parts or entry.tokens}
        for component in sorted(kept):
            before, now = manifest.parallelism[component], here.get(component)
            if now == before:
                continue
            got = "no such component" if now is None else f"{now} tasks"
            raise StateError(
                f"topology '{self._plan.topology}', component '{component}'",
                f"has state of {before} tasks in {self.store.url}",
                got,
                "Keep its name and number of tasks, or start afresh with --fresh.",
            )
