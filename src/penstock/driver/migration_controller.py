"""Data migration on a running topology: what the tasks report goes to the policy, what it suggests becomes route
changes for the workers."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from penstock.control.migration import Branch, BranchNodeLoad, Migrate, MigrationPolicy
from penstock.metrics.stats import TaskStats
from penstock.plan.model import Plan
from penstock.protocol.commands import SetMigrationRoutes
from penstock.settings import Settings

log = logging.getLogger("penstock.migration")


@dataclass(frozen=True)
class Decision:
    """What was decided, and why; for people."""

    time: float
    component: str
    text: str


class MigrationController:
    """The enactor of one run: ``decide`` is called once an interval with the newest counters of all tasks."""

    def __init__(self, plan: Plan, settings: Settings) -> None:
        self.decisions: deque[Decision] = deque(maxlen=1000)
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
        """No component's data may be migrated: there is nothing to look at."""
        return not self._policies

    def decide(self, now: float, stats: Mapping[int, TaskStats]) -> list[SetMigrationRoutes]:
        """Route changes for all workers."""
        before, self._before = self._before, (now, stats)
        if before is None or now <= before[0]:
            return []
        orders = []
        for component, policy in self._policies.items():
            branches = [
                self._branch(task, now - before[0], before[1], stats) for task in self._plan.tasks_of[component]
            ]
            suggestions = policy.decide(branches)
            if not suggestions:
                continue
            self._version += 1
            orders.append(SetMigrationRoutes(component, self._routes(component, policy.routes), self._version))
            for each in suggestions:
                what = f"{each.heavy} → {each.light}" if isinstance(each, Migrate) else f"{each.heavy} restored"
                self.decisions.append(Decision(now, component, f"{what}: {each.reason}"))
                log.info("%s: %s", what, each.reason)
        return orders

    def current_routes(self) -> list[SetMigrationRoutes]:
        """The changes there are, for a worker that does not have them yet."""
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
        """A task and what is fused with it: the way from the branching point to the merge."""
        tasks = [task]
        for each in tasks:
            tasks += self._plan.fused_tasks(each)
        nodes, capacities = [], []
        for each in tasks:
            then, stats = before.get(each, TaskStats()), now.get(each, TaskStats())
            nodes.append(_load(then, stats, seconds))
            if stats.busy > 0:
                capacities.append(stats.received_bytes / stats.busy)
        # No link here has a known bandwidth: a branch carries what its slowest task gets done in a second of work.
        return Branch(self._plan.task[task].key, tuple(nodes), max(1.0, min(capacities, default=1.0)))


def _load(then: TaskStats, now: TaskStats, seconds: float) -> BranchNodeLoad:
    arrived = (now.arrived_bytes - then.arrived_bytes) / seconds
    done = (now.received_bytes - then.received_bytes) / seconds
    size = now.arrived_bytes / now.arrived if now.arrived else 0.0
    # A task that has slowed its senders gets no more than it can take: what it would get is what counts.
    return BranchNodeLoad(
        min(1.0, now.peak / now.capacity) if now.capacity else 0.0, max(arrived, now.demand * size), done
    )
