"""Data migration of a running topology: passes the load of the tasks to the migration policy, and turns its
decisions into route changes for the workers."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping

from penstock.control.migration import Branch, BranchNodeLoad, Migrate, MigrationPolicy
from penstock.driver.policy_decision import PolicyDecision
from penstock.metrics.stats import TaskStats
from penstock.plan.model import Plan
from penstock.protocol.commands import SetMigrationRoutes
from penstock.settings import Settings

log = logging.getLogger("penstock.migration")


class MigrationController:
    """Migrates the data of one query run. The control thread calls ``decide`` once per interval; other threads may
    copy ``decisions``."""

    def __init__(self, plan: Plan, settings: Settings) -> None:
        self.decisions: deque[PolicyDecision] = deque(maxlen=1000)
        self._plan = plan
        self._policies = {
            component: MigrationPolicy(
                settings.migration.alpha,
                settings.migration.beta,
                settings.flow.load_factor,
                settings.migration.recovery,
            )
            for component in plan.migratable
        }
        self._before: tuple[float, Mapping[int, TaskStats]] | None = None
        self._version = plan.routes.version

    @property
    def idle(self) -> bool:
        """Whether no component's data may be migrated, so that there is nothing to decide."""
        return not self._policies

    def decide(self, now: float, stats: Mapping[int, TaskStats]) -> list[SetMigrationRoutes]:
        """Return the route changes to send to all workers. ``stats``: the newest counters of all tasks, by task
        id; the caller must not change them afterwards."""
        before, self._before = self._before, (now, stats)
        if before is None or now <= before[0]:
            return []
        commands = []
        for component, policy in self._policies.items():
            branches = [
                self._branch(task, now - before[0], before[1], stats) for task in self._plan.tasks_of[component]
            ]
            suggestions = policy.decide(branches)
            if not suggestions:
                continue
            self._version += 1
            commands.append(SetMigrationRoutes(component, self._routes(component, policy.routes), self._version))
            for each in suggestions:
                change = f"{each.heavy} → {each.light}" if isinstance(each, Migrate) else f"{each.heavy} restored"
                self.decisions.append(PolicyDecision(now, component, f"{change}: {each.reason}"))
                log.info("%s: %s", change, each.reason)
        return commands

    def current_routes(self) -> list[SetMigrationRoutes]:
        """Return the route changes in force, for a worker that has just connected."""
        return [
            SetMigrationRoutes(component, self._routes(component, dict(policy.routes)), self._version)
            for component, policy in self._policies.items()
            if policy.routes
        ]

    def _routes(self, component: str, routes: Mapping[str, str]) -> dict[int, int]:
        task_of = {self._plan.task[task].key: task for task in self._plan.tasks_of[component]}
        return {task_of[heavy]: task_of[light] for heavy, light in routes.items()}

    def _branch(
        self, task: int, seconds: float, before: Mapping[int, TaskStats], now: Mapping[int, TaskStats]
    ) -> Branch:
        """Return the load of a task and the tasks fused with it: a branch from the branching point to the
        merge."""
        tasks = [task]
        for each in tasks:
            tasks += self._plan.fused_tasks(each)
        nodes, capacities = [], []
        for each in tasks:
            then, stats = before.get(each, TaskStats()), now.get(each, TaskStats())
            nodes.append(_load(then, stats, seconds))
            if stats.busy > 0:
                capacities.append(stats.received_bytes / stats.busy)
        # The bandwidth of links is unknown. The capacity of a branch is what its slowest task processes in a
        # second of busy time.
        return Branch(self._plan.task[task].key, tuple(nodes), max(1.0, min(capacities, default=1.0)))


def _load(then: TaskStats, now: TaskStats, seconds: float) -> BranchNodeLoad:
    arrived = (now.arrived_bytes - then.arrived_bytes) / seconds
    done = (now.received_bytes - then.received_bytes) / seconds
    size = now.arrived_bytes / now.arrived if now.arrived else 0.0
    # A task that slows its senders receives only what it can process, so its demand counts instead.
    return BranchNodeLoad(
        min(1.0, now.peak / now.capacity) if now.capacity else 0.0, max(arrived, now.demand * size), done
    )
