"""Takes over a state directory when a query run starts, and finds the epoch and the task states to start from.

The query run starts from the newest manifest. It takes the directory over by writing a manifest of its own
generation (``state.manifest``), and only then removes unfinished files of earlier query runs. A crash at any point
therefore leaves either the earlier contents or the state that the query run starts from.
"""

from __future__ import annotations

import json
import logging
import time
from dataclasses import replace

from penstock.driver.commits import forget_published, read_published, write_published
from penstock.driver.kept_numbers import scaled_bolts
from penstock.driver.overtaken import check_waiting
from penstock.errors import StateError
from penstock.plan.model import Plan, Task
from penstock.plan.owners import owner_rule, why_not_rescaled
from penstock.protocol.task_states import Chains, InheritedTask, SavedTask, TaskStates
from penstock.state import manifest as manifests
from penstock.state import savepoints
from penstock.state.generations import Ownership
from penstock.state.manifest import Manifest, OvertakenFrames, TaskEntry
from penstock.state.store import StateStore
from penstock.storage.start_record import START_FILE
from penstock.topology.builder import Topology

log = logging.getLogger("penstock.recovery")


class StateDirectory:
    """The folder of one topology in the state directory. Not thread-safe."""

    def __init__(
        self, plan: Plan, topology: Topology, folder: str | None = None, owner: Ownership | None = None
    ) -> None:
        """``owner``: shared by all query runs of this driver. Without it, this object acts as a separate
        driver."""
        self.store = StateStore(folder or topology.settings.delivery.state_dir).child(topology.name)
        self.owner = owner or Ownership(topology.name)
        self._plan, self._delivery = plan, topology.settings.delivery.guarantee
        self._scaled = scaled_bolts(topology)
        self._manifest: Manifest | None = None
        self.published = 0
        """``epoch`` as found by ``recover``, if all sinks are known to have published it; otherwise 0."""

    @property
    def generation(self) -> int:
        """The newest generation that this driver has claimed."""
        return self.owner.generation

    @property
    def epoch(self) -> int:
        """The committed epoch to start from. 0 if there is no committed state."""
        return 0 if self._manifest is None else self._manifest.epoch

    def recover(self, published: int = 0) -> None:
        """Take the directory over and find the epoch to start from. Called once per query run, before it starts.

        ``published``: the newest epoch that all sinks are known to have published. Their tokens for it are
        dropped. Raises ``StateError`` if the state does not match the topology, and ``Superseded`` if another
        driver has taken over since the last call.
        """
        self.store.check_owner()
        generation = self.owner.claim(self.store)
        found = manifests.newest(self.store)
        if found is not None and found.generation > generation:
            self.owner.check(self.store)
        known = published if found is None else max(published, self._known_published(found))
        checked = None if found is None else self._check_manifest(found, published, known)
        self._check_waiting(found)
        self._start_generation(found, generation, known)
        self._manifest = checked
        self.published = self.epoch if self.epoch <= known else 0
        if self.epoch:
            log.info("topology '%s' continues from epoch %d", self._plan.topology, self.epoch)

    def _start_generation(self, found: Manifest | None, generation: int, published: int = 0) -> None:
        """Write the first manifest of a generation, and clean up. ``published``: the newest epoch that all sinks
        are known to have published."""
        # The record of what was published is written before the manifest that makes it readable. A crash in
        # between does no harm: the record of a generation without a manifest is never read.
        if found is not None and published >= found.epoch > 0:
            write_published(self.store, generation, found.epoch)
        if found is None:
            dead_letters = manifests.dead_letters_so_far(self.store)
            first = manifests.nothing(self._plan.topology, self._delivery, generation, time.time(), dead_letters)
        else:
            first = found.taken_over(generation)
        replace(first, scaled=self._scaled).write(self.store)
        self.owner.check(self.store)
        self._clean_up(generation)

    def _known_published(self, manifest: Manifest) -> int:
        """The newest epoch published by the manifest's generation or a later one. If an epoch after the manifest's
        was published, then so was the manifest's own."""
        later = {name.generation for name in manifests.history(self.store) if name >= manifest.name}
        return max((read_published(self.store, generation) for generation in later), default=0)

    def _clean_up(self, generation: int) -> None:
        """Remove files that no manifest refers to. An error is logged; the query run starts anyway."""
        try:
            manifests.sweep(self.store, generation)
            manifests.prune(self.store, generation)
            forget_published(self.store, generation)
        except StateError as error:
            log.warning("old snapshots could not be removed: %s", error)

    def inspect(self) -> None:
        """Find the epoch that a query run would start from now, without taking the directory over. Called to
        prefetch state while another query run still owns the directory.

        Leaves out the tokens of sinks, since the running query publishes them. Raises ``StateError`` if the state
        does not match the topology.
        """
        found = manifests.newest(self.store)
        self._manifest = None if found is None else self._check_manifest(found, found.epoch, found.epoch)

    def tasks(self) -> TaskStates:
        """Return the state that each task of the plan starts from, by task key. Empty if there is no committed
        state."""
        manifest = self._manifest
        if manifest is None or not manifest.epoch:
            return {}
        return {task.key: self._entry(manifest, task) for task in self._plan.tasks}

    def waiting(self) -> OvertakenFrames | None:
        """The tuples that the tasks process before all others. None if there are none."""
        return None if self._manifest is None or not self._manifest.epoch else self._manifest.overtaken

    def fall_back(self, error: str) -> None:
        """Make the next ``recover`` start from the previous committed epoch. Called when the snapshots of the
        current one cannot be read; ``error`` says why.

        Raises ``StateError`` if there is no earlier epoch, and ``Superseded`` if another driver has taken over.
        """
        self.owner.check(self.store)
        before = manifests.newest(self.store, before=self.epoch)
        if before is None or not before.epoch:
            raise StateError(
                f"topology '{self._plan.topology}'",
                f"its newest snapshot cannot be read, and there is no older one: {error}",
            )
        log.error(
            "%s FALLING BACK from epoch %d to epoch %d: tuples in between are processed again, and sinks that "
            "published their results will contain them twice.",
            error,
            self.epoch,
            before.epoch,
        )
        generation = self.owner.claim(self.store)
        self._start_generation(before, generation, self._known_published(before))

    def clear(self) -> None:
        """Discard all committed state, atomically, so that the next query run starts from nothing."""
        self.store.check_owner()
        self._start_generation(None, self.owner.claim(self.store))
        for name in self.store.list("tasks/"):
            if name.endswith(f"/{START_FILE}"):
                self.store.remove(name)

    def forget(self) -> None:
        """Make this object start from nothing, without changing the directory."""
        self._manifest = None

    def adopt(self, savepoint: StateStore) -> int:
        """Replace the state in this directory by a savepoint, and return the savepoint's epoch. The directory's
        own state stays valid until the savepoint has been copied completely.

        Raises ``StateError`` if the savepoint is damaged or does not match the topology, and ``Superseded`` if
        another driver has taken over.
        """
        savepoints.check_apart(self.store, savepoint, f"savepoint {savepoint.url}")
        self.store.check_owner()
        found = savepoints.find(savepoint)
        self._check_manifest(found, 0, 0)
        self._check_waiting(found)
        savepoints.verify(savepoint, found)  # before a running driver loses the directory to this one
        generation = self.owner.claim(self.store)
        copied = savepoints.copy_files(savepoint, found, self.store, generation)
        dead_letters = manifests.dead_letters_so_far(self.store)
        replace(copied, dead_letters=dead_letters, scaled=self._scaled).write(self.store)
        self.owner.check(self.store)
        self._clean_up(generation)
        return found.epoch

    def _entry(self, manifest: Manifest, task: Task) -> SavedTask | InheritedTask:
        before, now = manifest.parallelism.get(task.component, 0), self._tasks(task.component)
        if before in (0, now) or not _stateful(manifest, task.component):
            entry = manifest.tasks.get(task.key, TaskEntry()) if before == now else TaskEntry()
            return SavedTask(dict(entry.parts), json.dumps(entry.tokens))
        owners = owner_rule(self._plan, task.component)
        assert owners is not None  # ``_check_component`` has rejected components without an owner rule
        sources: dict[int, Chains] = {}
        for source in owners.share(task.index, before, now).sources:
            found = manifest.tasks.get(f"{task.component}/{source}", TaskEntry())
            if found.parts:
                sources[source] = dict(found.parts)
        return InheritedTask(before, now, owners, sources)

    def _check_manifest(self, manifest: Manifest, published: int, known: int) -> Manifest:
        """Return the manifest without the tokens of output that is published already. Raises ``StateError`` if a
        component with state no longer exists, or has a different number of tasks and cannot be rescaled.

        ``published``: the newest epoch that this driver's sinks have published; all its tokens are dropped.
        ``known``: the newest epoch that is recorded as published. Sinks publish its tokens again, which has no
        effect, but those of a component with a different number of tasks are dropped."""
        if manifest.epoch <= published:
            manifest = _without_tokens(manifest)
        for component, before in sorted(manifest.parallelism.items()):
            now = self._tasks(component)
            if now == before:
                continue
            if manifest.epoch <= known:
                manifest = _without_tokens(manifest, component)
            prepared = any(entry.tokens for entry in _entries(manifest, component))
            if not prepared and not _stateful(manifest, component):
                continue
            self._check_component(component, before, now, prepared, manifest.epoch)
        return manifest

    def _check_waiting(self, manifest: Manifest | None) -> None:
        """Raise ``StateError`` if the topology cannot process the tuples that a marker has overtaken."""
        if manifest is None or manifest.overtaken is None:
            return
        components = {key.rpartition("/")[0] for key in manifest.tasks}
        stateful = frozenset(each for each in components if _stateful(manifest, each))
        check_waiting(self._plan, manifest.overtaken, stateful, self.store.url)

    def _check_component(self, component: str, before: int, now: int, prepared: bool, epoch: int) -> None:
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
                f"it has {now} tasks now, but the output that its {before} tasks prepared in epoch {epoch} "
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
        """The number of tasks that the component has in the plan."""
        return len(self._plan.tasks_of.get(component, ()))


def _entries(manifest: Manifest, component: str) -> list[TaskEntry]:
    return [entry for key, entry in manifest.tasks.items() if key.rpartition("/")[0] == component]


def _stateful(manifest: Manifest, component: str) -> bool:
    return any(entry.parts for entry in _entries(manifest, component))


def _without_tokens(manifest: Manifest, component: str | None = None) -> Manifest:
    """Return the manifest without the tokens of one component, or of all components."""
    tasks = {
        key: TaskEntry(entry.parts) if component in (None, key.rpartition("/")[0]) else entry
        for key, entry in manifest.tasks.items()
    }
    return replace(manifest, tasks=tasks)
