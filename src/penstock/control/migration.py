"""Data migration to light branches (Sun 2022): decides which branch is overloaded and which branch takes its data.

Pure: the policy gets the load of every branch once per interval and returns suggestions, which its caller carries
out. ``control/segments.py`` has the records of migrated data.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from penstock.errors import SettingError


@dataclass(frozen=True)
class BranchNodeLoad:
    """The load of one node (on Spark: a task) in the last interval. Rates are in bytes per second."""

    queue_use: float
    """The used share of its input queue, 0 to 1."""
    bytes_in: float
    bytes_out: float
    """Bytes of processed input, so that a node with little output does not count as overloaded."""

    @property
    def growing(self) -> bool:
        return self.bytes_in > self.bytes_out


@dataclass(frozen=True)
class Branch:
    """One path from the branching point to the merge."""

    name: str
    nodes: tuple[BranchNodeLoad, ...]
    bandwidth: float
    """The minimum over its links, above 0. The unit is arbitrary but the same for all branches."""

    @property
    def queue_use(self) -> float:
        """Sun 2022, equation 1."""
        return max((node.queue_use for node in self.nodes), default=0.0)

    @property
    def surplus(self) -> float:
        """Δ in Sun 2022, equation 2: bytes per second that arrive and are not processed. Computed per node, so
        that a node that makes its data smaller or larger does not count as overloaded."""
        return sum(node.bytes_in - node.bytes_out for node in self.nodes)


@dataclass(frozen=True)
class Migrate:
    """Send the data for ``heavy`` to ``light`` from now on, even if another branch has received it until now."""

    heavy: str
    light: str
    reason: str


@dataclass(frozen=True)
class Restore:
    """Send the data for ``heavy`` to ``heavy`` again."""

    heavy: str
    reason: str


Suggestion = Migrate | Restore


def scores(branches: Iterable[Branch], alpha: float, beta: float) -> dict[str, float]:
    """The pressure of each branch (Sun 2022, equation 4): P = (α·Q + (1 − α)·Δ) / B^β.

    Sun 2022 adds shares, bytes per second and bandwidths without normalising them. Here Δ is relative to the
    largest positive Δ (0 if there is none) and B to the largest B, so that the weights have the same effect at any
    rate.
    """
    branches = list(branches)
    for branch in branches:
        if not (0 < branch.bandwidth < math.inf):
            raise ValueError(
                f"the bandwidth of a branch must be above 0 and finite, but {branch.name} has {branch.bandwidth}"
            )
    most = max((branch.surplus for branch in branches), default=0.0)
    widest = max((branch.bandwidth for branch in branches), default=1.0)
    found = {}
    for branch in branches:
        surplus = max(branch.surplus, 0.0) / most if most > 0 else 0.0
        found[branch.name] = (alpha * branch.queue_use + (1 - alpha) * surplus) / (
            branch.bandwidth / widest
        ) ** beta
    return found


class MigrationPolicy:
    """Sun 2022, algorithm 1, steps 2 to 6. Keeps the current routes; ``decide`` is called once per interval.

    A branch is heavy if one of its nodes uses more than ``overload`` of its queue and receives more than it
    processes. Its data then goes to the branch with the least pressure, until its queue use is below ``recovery``.
    A branch takes no data if it is heavy, is migrated itself, or has a queue above ``overload``: such a queue may
    only have stopped growing because its senders were stopped, and then its Δ is meaningless. If no branch can
    take the data nothing is suggested, and only backpressure acts.
    """

    def __init__(
        self, alpha: float = 0.3, beta: float = 0.5, overload: float = 0.8, recovery: float = 0.5
    ) -> None:
        _check("alpha", alpha, "between 0 and 1", 0 < alpha < 1)
        _check("beta", beta, "above 0", 0 < beta < math.inf)
        _check("overload", overload, "between 0 and 1", 0 < overload < 1)
        _check(
            "recovery",
            recovery,
            f"between 0 and the overload threshold {overload:g}",
            0 < recovery < overload,
        )
        self.alpha, self.beta, self.overload, self.recovery = alpha, beta, overload, recovery
        self._routes: dict[str, str] = {}
        self.routes: Mapping[str, str] = MappingProxyType(self._routes)
        """The branch that receives the data of each migrated branch: heavy → light."""

    def decide(self, branches: Sequence[Branch]) -> list[Suggestion]:
        """The changes to make now. A branch that is missing in ``branches`` no longer exists, and nothing is sent
        to it."""
        known = {branch.name: branch for branch in branches}
        if len(known) < len(branches):
            raise ValueError(f"the names of branches must be unique: {[branch.name for branch in branches]}")
        heavy = {branch.name: why for branch in branches if (why := self._heavy(branch))}
        found: list[Suggestion] = list(self._restore_recovered(known))
        free = [b for b in branches if b.queue_use <= self.overload and b.name not in self._routes]
        pressure = scores(branches, self.alpha, self.beta)
        light = min(free, key=lambda branch: pressure[branch.name], default=None)
        figures = ", ".join(f"{branch.name} {pressure[branch.name]:.3f}" for branch in free)

        for name, target in list(self._routes.items()):
            if target in known and target not in heavy:
                continue
            why = heavy.get(target, f"branch {target} no longer exists")
            if light:
                found.append(self._migrate(name, light.name, f"{why}; lowest score of {figures}"))
            else:
                found.append(self._restore(name, f"{why}, and no branch can take its data"))
        for name, why in heavy.items():
            if name not in self._routes and light:
                found.append(self._migrate(name, light.name, f"{why}; lowest score of {figures}"))
        return found

    def _heavy(self, branch: Branch) -> str:
        """The reason why the branch is heavy. Empty if it is not."""
        for node in branch.nodes:
            if node.queue_use > self.overload and node.growing:
                return (
                    f"branch {branch.name} uses {node.queue_use:.0%} of a queue, more than {self.overload:.0%}, "
                    f"and receives {node.bytes_in:,.0f} B/s but processes {node.bytes_out:,.0f} B/s"
                )
        return ""

    def _restore_recovered(self, known: Mapping[str, Branch]) -> Iterable[Restore]:
        for name in list(self._routes):
            if name not in known:
                yield self._restore(name, f"branch {name} no longer exists")
            elif (use := known[name].queue_use) < self.recovery:
                yield self._restore(
                    name, f"branch {name} uses {use:.0%} of its queue, less than {self.recovery:.0%}"
                )

    def _migrate(self, name: str, light: str, reason: str) -> Migrate:
        self._routes[name] = light
        return Migrate(name, light, reason)

    def _restore(self, name: str, reason: str) -> Restore:
        del self._routes[name]
        return Restore(name, reason)

    def validate(self) -> None:
        """Check the invariants that hold after every ``decide``."""
        for name, light in self._routes.items():
            assert name != light, f"{name} is migrated to itself"
            assert light not in self._routes, f"{name} is migrated to {light}, which is migrated itself"


def _check(name: str, value: float, rule: str, holds: bool) -> None:
    if not holds:
        raise SettingError(
            "migration",
            f"{name} must be {rule}, not {value!r}",
            "The defaults are the values that Sun 2022 measured as best.",
        )
