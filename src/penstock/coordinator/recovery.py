"""The state directory as a start of the topology finds it: which epoch it begins with, and what its tasks had.

The newest manifest decides. What later epochs wrote was never committed and goes.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from penstock.coordinator.commits import forget_published, read_published
from penstock.errors import StateError
from penstock.plan.model import Plan, Task
from penstock.plan.owners import owner_rule, why_not_rescaled
from penstock.state import manifest as manifests
from penstock.state.manifest import Manifest, TaskEntry
from penstock.state.snapshots import Part
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

    def recover(self, published: int = 0) -> None:
        """Take the directory over, and find what to begin with. Raises ``StateError`` where that does not fit the
        topology. ``published``: the newest epoch whose sinks are known to have published all, so that nothing they
        prepared for it is of use any more."""
        self.generation = manifests.claim(self.store)
        self._manifest = manifests.newest(self.store)
        manifests.clear_later(self.store, self.epoch)
        if self._manifest is not None:
            self._manifest = self._checked(self._manifest, published)
            log.info("topology '%s' goes on from epoch %d", self._plan.topology, self.epoch)

    def look(self) -> None:
        """Find what a start would begin with now, without taking the directory over: for reading ahead of that.
        Raises ``StateError`` where it does not fit the topology. What sinks prepared is left out: it is published
        by those who prepared it."""
        found = manifests.newest(self.store)
        self._manifest = None if found is None else self._checked(found, found.epoch)

    def tasks(self) -> dict[str, Any]:
        """What each task of the plan begins with, as JSON, by task key (``runtime.archive.Entries``)."""
        manifest = self._manifest
        if manifest is None:
            return {}
        return {task.key: self._entry(manifest, task) for task in self._plan.tasks}

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
        forget_published(self.store, before.epoch)

    def clear(self) -> None:
        """Begin from nothing: forget all that was committed."""
        manifests.claim(self.store)
        manifests.discard_after(self.store, 0)
        manifests.clear_later(self.store, 0)
        forget_published(self.store, 0)

    def adopt(self, savepoint: StateStore) -> int:
        """Begin from a savepoint instead of what is here; returns its epoch."""
        found = manifests.newest(savepoint)
        if found is None:
            raise StateError(f"savepoint {savepoint.url}", "must hold a manifest", "none", "Check the path.")
        self._checked(found, 0, of_savepoint=True)
        self.clear()
        manifests.copy(savepoint, found, self.store)
        return found.epoch

    def _entry(self, manifest: Manifest, task: Task) -> dict[str, Any]:
        before, now = manifest.parallelism.get(task.component, 0), self._tasks(task.component)
        if before in (0, now) or not _stateful(manifest, task.component):
            entry = manifest.tasks.get(task.key, TaskEntry()) if before == now else TaskEntry()
            return {"parts": _as_json(entry.parts), "tokens": entry.tokens}
        owners = owner_rule(self._plan, task.component)
        assert owners is not None  # else it was refused
        sources = {}
        for source in owners.share(task.index, before, now).sources:
            found = manifest.tasks.get(f"{task.component}/{source}", TaskEntry())
            if found.parts:
                sources[str(source)] = _as_json(found.parts)
        return {"before": before, "now": now, "owners": owners.to_json(), "sources": sources, "tokens": []}

    def _checked(self, manifest: Manifest, published: int, of_savepoint: bool = False) -> Manifest:
        """The manifest, without what sinks prepared where that is published. Raises ``StateError`` where a
        component with state is gone, or has another number of tasks and cannot have."""
        if manifest.epoch <= published:
            manifest = _without_tokens(manifest)
        known = 0 if of_savepoint else read_published(self.store)
        for component, before in sorted(manifest.parallelism.items()):
            now = self._tasks(component)
            if now == before:
                continue
            if manifest.epoch <= known:
                manifest = _without_tokens(manifest, component)
            prepared = any(entry.tokens for entry in _entries(manifest, component))
            if not prepared and not _stateful(manifest, component):
                continue
            self._check(component, before, now, prepared, manifest.epoch)
        return manifest

    def _check(self, component: str, before: int, now: int, prepared: bool, epoch: int) -> None:
        where = f"topology '{self._plan.topology}', component '{component}'"
        rule = f"has state of {before} tasks in {self.store.url}"
        if not now:
            way_out = "Keep its name, or start afresh with --fresh."
            raise StateError(where, rule, "no such component", way_out)
        if prepared:
            raise StateError(
                where,
                f"what its {before} tasks prepared in epoch {epoch} must be published before their number changes",
                f"{now} tasks, and no word that it was",
                f"Start it once more with {before} tasks and end it with Ctrl-C; then change the number.",
            )
        why_not = why_not_rescaled(self._plan, component)
        if why_not:
            way_out = f"Keep {before} tasks, or start afresh with --fresh."
            raise StateError(where, rule, f"{now} tasks, and it {why_not}", way_out)

    def _tasks(self, component: str) -> int:
        """How many tasks the component has in the plan."""
        return len(self._plan.tasks_of.get(component, ()))


def _entries(manifest: Manifest, component: str) -> list[TaskEntry]:
    return [entry for key, entry in manifest.tasks.items() if key.rpartition("/")[0] == component]


def _stateful(manifest: Manifest, component: str) -> bool:
    return any(entry.parts for entry in _entries(manifest, component))


def _without_tokens(manifest: Manifest, component: str | None = None) -> Manifest:
    """Of one component, or of all."""
    tasks = {
        key: TaskEntry(entry.parts) if component in (None, key.rpartition("/")[0]) else entry
        for key, entry in manifest.tasks.items()
    }
    return replace(manifest, tasks=tasks)


def _as_json(chains: Mapping[str, list[Part]]) -> dict[str, Any]:
    return {state: [part.to_json() for part in chain] for state, chain in chains.items()}
