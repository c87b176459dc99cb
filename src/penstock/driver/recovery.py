"""The state directory as a query run finds it: which epoch it begins with, and the state of its tasks then.

The newest manifest decides. A query run takes the directory over by writing a manifest of its own generation
(``state.manifest``), and only then removes what others left unfinished. So whatever fails or dies on the way, the
directory holds either what it held before or what the query run begins with.
"""

from __future__ import annotations

import logging
import time
from dataclasses import replace

from penstock.driver.commits import forget_published, read_published, write_published
from penstock.errors import StateError
from penstock.plan.model import Plan, Task
from penstock.plan.owners import owner_rule, why_not_rescaled
from penstock.protocol.task_states import Chains, InheritedTask, SavedTask, TaskStates
from penstock.state import manifest as manifests
from penstock.state import savepoints
from penstock.state.generations import Ownership
from penstock.state.manifest import Manifest, TaskEntry
from penstock.state.store import StateStore
from penstock.storage.start_record import START_FILE
from penstock.topology.builder import Topology

log = logging.getLogger("penstock.recovery")


class StateDirectory:
    """A topology's own folder in the state directory."""

    def __init__(
        self, plan: Plan, topology: Topology, folder: str | None = None, owner: Ownership | None = None
    ) -> None:
        """``owner``: of all query runs of this driver; without one, this object stands for a driver of its own."""
        self.store = StateStore(folder or topology.settings.delivery.state_dir).child(topology.name)
        self.owner = owner or Ownership(topology.name)
        self._plan, self._delivery = plan, topology.settings.delivery.guarantee
        self._manifest: Manifest | None = None

    @property
    def generation(self) -> int:
        """The generation that this driver claimed last."""
        return self.owner.generation

    @property
    def epoch(self) -> int:
        """The committed epoch to begin with; 0: from nothing."""
        return 0 if self._manifest is None else self._manifest.epoch

    def recover(self, published: int = 0) -> None:
        """Take the directory over, and find what to begin with. Raises ``StateError`` where that does not fit the
        topology, ``Superseded`` where another driver has taken over since this one last did. ``published``: the
        newest epoch whose sinks are known to have published all, so that nothing they prepared for it is of use
        any more."""
        self.store.check_owner()
        generation = self.owner.claim(self.store)
        found = manifests.newest(self.store)
        if found is not None and found.generation > generation:
            self.owner.check(self.store)
        checked = None if found is None else self._checked(found, published)
        self._begin_with(found, generation)
        self._manifest = checked
        if self.epoch:
            log.info("topology '%s' goes on from epoch %d", self._plan.topology, self.epoch)

    def _begin_with(self, found: Manifest | None, generation: int) -> None:
        """The switch to another generation, and the clean-up after it. What was published is carried over before:
        the record of a generation without a manifest is never read."""
        if found is not None and self._known_published(found) >= found.epoch > 0:
            write_published(self.store, generation, found.epoch)
        if found is None:
            dead_letters = manifests.dead_letters_so_far(self.store)
            made = manifests.nothing(self._plan.topology, self._delivery, generation, time.time(), dead_letters)
        else:
            made = found.taken_over(generation)
        made.write(self.store)
        self.owner.check(self.store)
        self._clean_up(generation)

    def _known_published(self, manifest: Manifest) -> int:
        """The newest published epoch of a history. If a later one than the manifest's was published, so was the
        manifest's."""
        later = {name.generation for name in manifests.history(self.store) if name >= manifest.name}
        return max((read_published(self.store, generation) for generation in later), default=0)

    def _clean_up(self, generation: int) -> None:
        """Remove what no manifest needs. If that fails, the query run starts all the same."""
        try:
            manifests.sweep(self.store, generation)
            manifests.prune(self.store, generation)
            forget_published(self.store, generation)
        except StateError as error:
            log.warning("old snapshots stay: %s", error)

    def look(self) -> None:
        """Find what a query run would begin with now, without taking the directory over, to prefetch it.
        Raises ``StateError`` where it does not fit the topology. What sinks prepared is left out: it is published
        by those who prepared it."""
        found = manifests.newest(self.store)
        self._manifest = None if found is None else self._checked(found, found.epoch)

    def tasks(self) -> TaskStates:
        """What each task of the plan begins with, as JSON, by task key (``runtime.archive.Entries``)."""
        manifest = self._manifest
        if manifest is None or not manifest.epoch:
            return {}
        return {task.key: self._entry(manifest, task) for task in self._plan.tasks}

    def fall_back(self, error: str) -> None:
        """The epoch's snapshots cannot be read: the next ``recover`` begins with the one before. Raises
        ``StateError`` where there is none, ``Superseded`` where another driver has taken over."""
        self.owner.check(self.store)
        before = manifests.newest(self.store, before=self.epoch)
        if before is None or not before.epoch:
            raise StateError(
                f"topology '{self._plan.topology}'",
                f"its newest snapshot cannot be read, and there is no other: {error}",
            )
        log.error(
            "%s FALLING BACK from epoch %d to epoch %d: what was done in between is done again, and sinks that "
            "published it will hold it twice.",
            error,
            self.epoch,
            before.epoch,
        )
        self._begin_with(before, self.owner.claim(self.store))

    def clear(self) -> None:
        """Begin from nothing: forget all that was committed. It is forgotten at once or not at all."""
        self.store.check_owner()
        self._begin_with(None, self.owner.claim(self.store))
        for name in self.store.list("tasks/"):
            if name.endswith(f"/{START_FILE}"):
                self.store.remove(name)

    def forget(self) -> None:
        """Begin from nothing, and leave what is here as it is."""
        self._manifest = None

    def adopt(self, savepoint: StateStore) -> int:
        """Begin from a savepoint instead of what is here; returns its epoch. What is here stays in force until the
        savepoint is copied whole."""
        savepoints.check_apart(self.store, savepoint, f"savepoint {savepoint.url}")
        self.store.check_owner()
        found = savepoints.find(savepoint)
        self._checked(found, 0, of_savepoint=True)
        savepoints.verify(savepoint, found)  # before a running driver loses the directory to this one
        generation = self.owner.claim(self.store)
        copied = savepoints.copy_files(savepoint, found, self.store, generation)
        replace(copied, dead_letters=manifests.dead_letters_so_far(self.store)).write(self.store)
        self.owner.check(self.store)
        self._clean_up(generation)
        return found.epoch

    def _entry(self, manifest: Manifest, task: Task) -> SavedTask | InheritedTask:
        before, now = manifest.parallelism.get(task.component, 0), self._tasks(task.component)
        if before in (0, now) or not _stateful(manifest, task.component):
            entry = manifest.tasks.get(task.key, TaskEntry()) if before == now else TaskEntry()
            return SavedTask(dict(entry.parts), entry.tokens)
        owners = owner_rule(self._plan, task.component)
        assert owners is not None  # else it was refused
        sources: dict[int, Chains] = {}
        for source in owners.share(task.index, before, now).sources:
            found = manifest.tasks.get(f"{task.component}/{source}", TaskEntry())
            if found.parts:
                sources[source] = dict(found.parts)
        return InheritedTask(before, now, owners, sources, [])

    def _checked(self, manifest: Manifest, published: int, of_savepoint: bool = False) -> Manifest:
        """The manifest, without what sinks prepared where that is published. Raises ``StateError`` where a
        component with state is gone, or has another number of tasks and cannot have."""
        if manifest.epoch <= published:
            manifest = _without_tokens(manifest)
        known = 0 if of_savepoint else self._known_published(manifest)
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
        if not now:
            raise StateError(
                where,
                f"{self.store.url} holds state of its {before} tasks, but the topology has no such component",
                "Keep its name, or start afresh with --fresh.",
            )
        if prepared:
            raise StateError(
                where,
                f"it has {now} tasks now, but what its {before} tasks prepared in epoch {epoch} "
                "may not be published yet",
                f"Start it once more with {before} tasks and end it with Ctrl-C; then change the number.",
            )
        why_not = why_not_rescaled(self._plan, component)
        if why_not:
            raise StateError(
                where,
                f"it has {now} tasks now, but {self.store.url} holds state of {before} tasks, and it {why_not}",
                f"Keep {before} tasks, or start afresh with --fresh.",
            )

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
