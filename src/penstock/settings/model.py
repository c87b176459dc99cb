"""``Settings``: all groups together. Values are changed by dotted names and read from the command line."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock.errors import SettingError
from penstock.settings.fields import check_value, from_text, guess, setting
from penstock.settings.groups import (
    Delivery,
    Flow,
    Group,
    Lifecycle,
    Migration,
    Monitor,
    Scaling,
    Transport,
    Workers,
)
from penstock.settings.placement import Placement


def _why(text: str) -> dict[str, str]:
    return {"unit": "", "why": text}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """All settings of a topology: ``Settings(delivery=Delivery("exactly_once", epoch_interval=1.0), seed=3)``.

    ``conf`` contains the user's own values. ``parse`` reads the command line, where a setting is named
    ``flow.load_factor``, and the first setting of a group by the name of the group alone:
    ``delivery=exactly_once``.
    """

    delivery: Delivery = field(default=Delivery(), metadata=_why("what is promised about every tuple"))
    flow: Flow = field(default=Flow(), metadata=_why("what happens when a task receives more than it can process"))
    migration: Migration = field(
        default=Migration(), metadata=_why("tuples of an overloaded task are processed by another one")
    )
    workers: Workers = field(
        default=Workers(), metadata=_why("how many workers there are, and which components share them")
    )
    scaling: Scaling = field(default=Scaling(), metadata=_why("bolts get more or fewer tasks automatically"))
    monitor: Monitor = field(
        default=Monitor(), metadata=_why("the load of executors, streams and nodes in each load sample")
    )
    placement: Placement = field(default=Placement(), metadata=_why("on which nodes workers run"))
    transport: Transport = field(
        default=Transport(), metadata=_why("how tuples get from one executor to the next")
    )
    lifecycle: Lifecycle = field(default=Lifecycle(), metadata=_why("starting, watching, restarting and ending"))
    seed: int = setting(
        0, "", "where the groupings' random numbers start, so that a run can be repeated", zero=True
    )
    conf: Mapping[str, Any] = field(
        default_factory=dict, metadata=_why("the user's own values, handed to every component")
    )

    def __post_init__(self) -> None:
        for name, kind in GROUPS.items():
            value = getattr(self, name)
            if not isinstance(value, kind):
                raise SettingError(
                    f"setting {name}",
                    f"{value!r} is not a {kind.__name__}",
                    f"Write {name}={kind.__name__}({value!r}).",
                )
        check_value("seed", BY_NAME["seed"], self.seed)
        if not self.migration.recovery < self.flow.load_factor:
            raise SettingError(
                "setting migration.recovery",
                f"{self.migration.recovery!r} is not below flow.load_factor, {self.flow.load_factor:g}, and a "
                "task must recover before it is overloaded again",
                "Try 0.5.",
            )
        if self.scaling.policy != "off":
            self._check_interval("scaling", self.scaling.interval, "two", 2, "Try 5.")
        if self.monitored:
            self._check_interval("monitor", self.monitor.interval, "four", 4, "Try 30.")

    def _check_interval(self, group: str, length: float, number: str, reports: int, hint: str) -> None:
        interval = self.lifecycle.metrics_interval
        if length < reports * interval:
            rule = f"it must be at least {number} reports of lifecycle.metrics_interval, {interval:g} s, long"
            raise SettingError(f"setting {group}.interval", f"{length!r} is not allowed: {rule}", hint)

    @property
    def monitored(self) -> bool:
        """Whether executors and the streams between them are monitored: for a database, for display or for
        ERDM."""
        return self.monitor.store != "off" or self.placement.policy == "erdm"

    def with_values(self, values: Mapping[str, Any]) -> Settings:
        """A copy with other values, by dotted name: ``{"flow.load_factor": 0.7, "delivery": "exactly_once"}``.

        The name of a group denotes its first setting, or the whole group if the value is a group. ``conf.NAME``
        changes one of the user's own values. Raises ``SettingError`` for an unknown name.
        """
        top: dict[str, Any] = {}
        inside: dict[str, dict[str, Any]] = {}
        for name, value in values.items():
            if name.startswith("conf."):
                top["conf"] = {**top.get("conf", self.conf), name.removeprefix("conf."): value}
            elif name in ("seed", "conf") or isinstance(value, Group):
                top[name] = value
            else:
                group, _, inner = full_name(name).partition(".")
                inside.setdefault(group, {})[inner] = value
        for group, changes in inside.items():
            top[group] = dataclasses.replace(top.get(group, getattr(self, group)), **changes)
        return dataclasses.replace(self, **top)

    @classmethod
    def parse(cls, assignments: Iterable[str], base: Settings | None = None) -> Settings:
        """Apply ``NAME=VALUE`` texts to ``base``, or to the defaults. If a name occurs twice, the last value is
        used."""
        values: dict[str, Any] = {}
        for text in assignments:
            name, sign, value = text.partition("=")
            if not sign or not name:
                raise SettingError(f"--set {text}", f"{text!r} does not have the form NAME=VALUE")
            if name == "conf":
                hint = f"Write --set conf.NAME={value} to set one of your own values."
                raise SettingError(f"--set {text}", "conf is a group of values that you name yourself", hint)
            if name.startswith("conf."):
                values[name] = guess(value)
            else:
                name = full_name(name)
                values[name] = from_text(name, BY_NAME[name], value)
        return (base or cls()).with_values(values)


GROUPS: dict[str, type[Group]] = {
    kind.group_name(): kind
    for kind in (Delivery, Flow, Migration, Workers, Scaling, Monitor, Placement, Transport, Lifecycle)
}
BY_NAME: dict[str, dataclasses.Field[Any]] = {
    f"{group}.{spec.name}": spec
    for group, kind in GROUPS.items()
    for spec in dataclasses.fields(kind)  # type: ignore[arg-type]
} | {spec.name: spec for spec in dataclasses.fields(Settings) if spec.name == "seed"}
"""Every setting by its dotted name, with default and metadata."""
_FIRST: dict[str, str] = {name.partition(".")[0]: name for name in reversed(BY_NAME)}


def full_name(name: str) -> str:
    """The dotted name of a setting; for a group, that of its first setting. Raises ``SettingError`` for an unknown
    name."""
    found = _FIRST.get(name, name)
    if found not in BY_NAME:
        near = _similar(name)
        hint = f"Did you mean {_either(near)}?" if near else f"The settings are: {', '.join(sorted(BY_NAME))}."
        raise SettingError(f"setting {name}", "there is no such setting", hint)
    return found


def _similar(name: str) -> list[str]:
    """Settings with a similar name: the same name in any group, otherwise the most similar spelling."""
    last = name.rpartition(".")[2]
    named_so = [each for each in BY_NAME if each.rpartition(".")[2] == last]
    if named_so:
        return named_so
    bare = [each.rpartition(".")[2] for each in BY_NAME]
    near = difflib.get_close_matches(name, [*BY_NAME, *GROUPS, *bare], 1)
    return [each for each in [*GROUPS, *BY_NAME] if near and near[0] in (each, each.rpartition(".")[2])]


def _either(names: list[str]) -> str:
    """The names as they are listed in a sentence: ``a``, ``a or b``, ``a, b or c``."""
    *others, last = names
    return f"{', '.join(others)} or {last}" if others else last
