"""Data migration of a running topology: passes the load of the tasks to the migration policy, and turns its
decisions into route changes for the workers."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from penstock.control.links import BranchLinks, LinkSpeeds
from penstock.control.migration import Branch, BranchNodeLoad, Migrate, MigrationPolicy
from penstock.driver.engine import executor_of
from penstock.driver.policy_decision import PolicyDecision
from penstock.metrics.stats import TaskStats
from penstock.plan.model import Edge, Plan, WorkerId
from penstock.protocol.commands import Command, ProbeLinks, SetMigrationRoutes
from penstock.settings import Settings
from penstock.settings.rates import parse_rates
from penstock.topology.groupings import Forward

log = logging.getLogger("penstock.migration")


class MigrationController:
    """Migrates the data of one query run. The control thread calls ``decide`` once per interval; other threads may
    copy ``decisions``."""

    def __init__(
        self, plan: Plan, settings: Settings, places: Callable[[], Mapping[WorkerId, str]] = dict
    ) -> None:
        """``places``: returns the node of each worker."""
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
        self._links = LinkSpeeds(parse_rates(settings.migration.bandwidth))
        self._places = places

    @property
    def idle(self) -> bool:
        """Whether no component's data may be migrated, so that there is nothing to decide."""
        return not self._policies

    def begin(self) -> list[Command]:
        """Return the commands to send to all workers at the beginning: to measure links if there are several
        nodes."""
        return [ProbeLinks()] if len(set(self._places().values())) > 1 else []

    def decide(
        self,
        now: float,
        stats: Mapping[int, TaskStats],
        links: Mapping[tuple[WorkerId, WorkerId], float] = MappingProxyType({}),
    ) -> list[SetMigrationRoutes]:
        """Return the route changes to send to all workers. ``stats``: the newest counters of all tasks, by task
        id; the caller must not change them afterwards. ``links``: the measured bytes per second between
        workers."""
        before, self._before = self._before, (now, stats)
        if before is None or now <= before[0]:
            return []
        commands = []
        for component, policy in self._policies.items():
            tasks = [self._plan.branch_of(task) for task in self._plan.tasks_of[component]]
            branches = [
                Branch(
                    self._plan.task[branch[0]].key,
                    tuple(
                        _load(before[1].get(task, TaskStats()), stats.get(task, TaskStats()), now - before[0])
                        for task in branch
                    ),
                    bandwidth,
                )
                for branch, bandwidth in zip(tasks, self._bandwidths(tasks, links), strict=True)
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

    def _bandwidths(
        self, branches: Sequence[tuple[int, ...]], links: Mapping[tuple[WorkerId, WorkerId], float]
    ) -> list[float]:
        """The bandwidth of each branch."""
        places = self._places()
        measured: dict[tuple[str, str], list[float]] = {}
        for (source, target), speed in links.items():
            measured.setdefault((_name(places.get(source)), _name(places.get(target))), []).append(speed)
        return self._links.bandwidths([self._links_of(branch, places) for branch in branches], measured)

    def _links_of(self, branch: tuple[int, ...], places: Mapping[WorkerId, str]) -> BranchLinks:
        def nodes(component: str, edge: Edge) -> set[str]:
            among = branch if type(edge.grouping) is Forward else plan.tasks_of[component]
            return {_name(places.get(worker_of[task])) for task in among if plan.task[task].component == component}

        plan, worker_of = self._plan, self._plan.routes.worker_of
        ends: set[tuple[str, str]] = set()
        for task in branch:
            here, component = _name(places.get(worker_of[task])), plan.task[task].component
            for edge in plan.edges:
                if edge.fused:
                    continue
                source = plan.source_of(edge)
                if edge.target == component:
                    ends |= {(node, here) for node in nodes(source, edge)}
                if source == component:
                    ends |= {(here, node) for node in nodes(edge.target, edge)}
        return BranchLinks(tuple(plan.task[task].key for task in branch), frozenset(ends))


def _name(node: str | None) -> str:
    """The engine's name of a node, which users know."""
    return executor_of(node or "")


def _load(then: TaskStats, now: TaskStats, seconds: float) -> BranchNodeLoad:
    arrived = (now.arrived_bytes - then.arrived_bytes) / seconds
    done = (now.received_bytes - then.received_bytes) / seconds
    size = now.arrived_bytes / now.arrived if now.arrived else 0.0
    # A task that slows its senders receives only what it can process, so its demand counts instead.
    return BranchNodeLoad(
        min(1.0, now.peak / now.capacity) if now.capacity else 0.0, max(arrived, now.demand * size), done
    )
