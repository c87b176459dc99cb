"""Typed settings of a topology: each with its unit, its default and the reason for it."""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock.errors import SettingError


def _setting(default: Any, unit: str, why: str, choices: tuple[str, ...] = (), zero: bool = False) -> Any:
    return field(default=default, metadata={"unit": unit, "why": why, "choices": choices, "zero": zero})


@dataclass(frozen=True)
class Settings:
    """What the runtime can be told. ``parse`` turns ``key=value`` texts of the command line into one."""

    delivery: str = _setting(
        "at_most_once",
        "",
        "the level of guarantee: nothing tracked, tuples acked and replayed, or epochs committed",
        ("at_most_once", "at_least_once", "exactly_once"),
    )
    max_spout_pending: int = _setting(
        50_000, "tuples", "unacked tuples of a spout task, at least once; about 0.1 s of a fast word count"
    )
    message_timeout: float = _setting(30.0, "s", "a tuple not acked for so long has failed; as in Storm")
    epoch_interval: float = _setting(
        10.0, "s", "between two commits; what a restart does again is at most about this much"
    )
    state_dir: str = _setting(
        "penstock-state", "", "folder for state that survives: a path, or an fsspec URL all nodes can reach"
    )
    flow: str = _setting(
        "step",
        "",
        "how an overloaded task slows its senders: step by step, by stopping the spouts, by credits, or not",
        ("step", "spout", "credit", "none"),
    )
    load_factor: float = _setting(0.8, "", "L: the share of its inbox from which a task counts as overloaded")
    step_factor: float = _setting(2.0, "", "v': what a step divides a sender's rate by")
    overflow_bytes: int = _setting(
        268_435_456, "bytes", "what may wait on local disk for one task, so that it holds up no other", zero=True
    )
    board: str = _setting(
        "coordinator", "", "where task messages are posted: the coordinator, or zookeeper://host:port/path"
    )
    migration: bool = _setting(
        True, "", "tuples for an overloaded task of a bolt that works in parts go to a light one meanwhile"
    )
    migration_interval: float = _setting(0.5, "s", "between two looks at the branches; two reports of each task")
    migration_alpha: float = _setting(0.3, "", "weight of the queue against the surplus; D measured 0.3 best")
    migration_beta: float = _setting(0.5, "", "weight of the bandwidth; D measured 0.5 best")
    recovery: float = _setting(0.5, "", "share of its queue below which a migrated branch gets its data again")
    scaling: str = _setting(
        "off",
        "",
        "whether bolts get more or fewer tasks by themselves: by time-outs as A does, by rates, or not",
        ("off", "failures", "rate"),
    )
    scaling_window: float = _setting(
        5.0, "s", "of one look at the load: twenty reports of each task, so what one more or less brings is little"
    )
    scaling_least: int = _setting(1, "executors", "a bolt keeps at least; those of a quiet hour cost a slot each")
    scaling_most: int = _setting(
        32,
        "executors",
        "a bolt gets at most; half the slots of a local master, for old and new topology stand side by side",
    )
    scaling_cool_down: float = _setting(
        30.0,
        "s",
        "after a replacement in which none is decided: its backlog looks like a load, and A's ring is as long",
        zero=True,
    )
    scaling_windows: int = _setting(6, "windows", "n: what A's average and S² look back; ours, A gives no value")
    scaling_threshold: float = _setting(
        25.0, "time-outs²", "C: S² above which A's policy acts; five more or less are chance", zero=True
    )
    scaling_target: float = _setting(
        0.7, "", "share of its time the busiest task is to work, by rates: room for what varies within a window"
    )
    monitor: str = _setting(
        "off",
        "",
        "where the load of each window is kept: off, memory, sqlite (in state_dir), a file, or postgresql://…",
    )
    monitor_window: float = _setting(
        30.0,
        "s",
        "of one look at executors and streams; C's choice, between the cost of telling and old figures",
    )
    monitor_keep: float = _setting(
        86_400.0, "s", "for which windows stay in the database: a day's course, some MB for a hundred executors"
    )
    placement: str = _setting(
        "spark",
        "",
        "where slots run: as Spark spreads them, or by ERDM on few nodes, by the load, so that others are free",
        ("spark", "erdm"),
    )
    placement_fill: float = _setting(
        0.9,
        "",
        "share of a node's limits up to which ERDM fills those it keeps: room for what varies",
    )
    spare_seats: int = _setting(
        0,
        "seats",
        "kept free on each node, for each stage of bolts, so that a slot can move there alone; each is a process",
        zero=True,
    )
    node_cores: float = _setting(
        0.0, "cores", "a node has; 0: those of its machine, shared evenly by the nodes on it", zero=True
    )
    node_memory: int = _setting(0, "bytes", "a node has; 0: as for node_cores", zero=True)
    node_bandwidth: float = _setting(
        125_000_000.0, "bytes/s", "a node's link carries, in and out together; 1 Gb/s. No node tells it"
    )
    node_cpu_limit: float = _setting(0.8, "", "share of its cores from which a node is at its limit")
    node_memory_limit: float = _setting(0.8, "", "share of its memory, likewise")
    node_bandwidth_limit: float = _setting(0.8, "", "share of its bandwidth, likewise")
    node_watts: str = _setting(
        "35,40,8,4", "W", "a node draws idle, and more with CPU, memory, network in full use; fits C's figure 13"
    )
    on_error: str = _setting(
        "drop",
        "",
        "what a user's exception does: drop the tuple and count it, or stop the topology",
        ("drop", "stop"),
    )
    linger: float = _setting(
        0.002, "s", "how long a spout's first tuple waits for company; two tuples a frame at 1,000/s", zero=True
    )
    busy_linger: float = _setting(
        0.02, "s", "the same for a slot that never pauses: larger frames cost less; its queue is longer than this"
    )
    frame_bytes: int = _setting(
        131_072, "bytes", "aim for a full frame; the knee of cost per byte lies at 64-256 KB"
    )
    inbox_capacity: int = _setting(16_384, "tuples", "a task's inbox, at least; more only adds waiting time")
    inbox_time: float = _setting(
        0.1,
        "s",
        "of a task's own rate that its inbox holds, if that is more: signals need a tenth of it",
        zero=True,
    )
    spout_pause: float = _setting(
        0.001, "s", "pause after a next_tuple that emitted nothing; SPEC 1.2 asks for about 1 ms"
    )
    metrics_interval: float = _setting(0.25, "s", "how often a slot reports; four times a second is live")
    start_timeout: float = _setting(
        60.0, "s", "how long the slots may take to connect and open; a cold JVM needs about 5 s"
    )
    heartbeat_timeout: float = _setting(
        20.0, "s", "a slot silent for longer is dead: a killed Python daemon shows in no other way"
    )
    drain_timeout: float = _setting(10.0, "s", "how long a graceful end waits for tuples in flight")
    max_restarts: int = _setting(10, "", "restarts, 0.5 s to 30 s apart, before giving up", zero=True)
    chaining: bool = _setting(
        True, "", "components joined by local_or_shuffle at equal parallelism share a slot: no hop"
    )
    crash_at: str = _setting("", "", "for tests of recovery: die at this step of a commit, as STEP:EPOCH[:SLOT]")
    seed: int = _setting(0, "", "of the groupings' random starts, so that runs can be repeated", zero=True)
    conf: Mapping[str, Any] = field(
        default_factory=dict, metadata={"unit": "", "why": "the user's own values, handed to every component"}
    )

    def __post_init__(self) -> None:
        for spec in dataclasses.fields(self):
            where, value = f"setting {spec.name}", getattr(self, spec.name)
            kind, choices = type(spec.default), spec.metadata.get("choices", ())
            if spec.name == "conf":
                continue
            if choices and value not in choices:
                raise SettingError(where, "must be one of " + ", ".join(choices), repr(value))
            fits = isinstance(value, kind) or (kind is float and type(value) is int)
            if not fits or (isinstance(value, bool) and kind is not bool):
                raise SettingError(where, f"takes a value of type {kind.__name__}", repr(value))
            if kind in (int, float):
                least = "at least 0" if spec.metadata["zero"] else "greater than 0"
                if not (0 <= value < math.inf) or (value == 0 and not spec.metadata["zero"]):
                    raise SettingError(where, f"must be {least}", repr(value))

        if not 0.5 < self.load_factor < 1:
            raise SettingError(
                "setting load_factor", "lies between 0.5 and 1", repr(self.load_factor), "The default is 0.8."
            )
        if not self.migration_alpha < 1:
            raise SettingError(
                "setting migration_alpha", "lies between 0 and 1", repr(self.migration_alpha), "Try 0.3."
            )
        if not self.recovery < self.load_factor:
            raise SettingError(
                "setting recovery",
                f"lies below load_factor, {self.load_factor:g}: a branch recovers before it is overloaded again",
                repr(self.recovery),
                "Try 0.5.",
            )
        if self.step_factor <= 1:
            raise SettingError(
                "setting step_factor", "is greater than 1: a step slows", repr(self.step_factor), "Try 2."
            )

        self._check_scaling()
        self._check_monitor()

    def _check_scaling(self) -> None:
        if self.scaling_most < self.scaling_least:
            raise SettingError(
                "setting scaling_most",
                f"is at least scaling_least, {self.scaling_least}",
                repr(self.scaling_most),
                "Raise it, or lower scaling_least.",
            )
        if self.scaling_windows < 2:
            raise SettingError(
                "setting scaling_windows",
                "is at least 2: one window has no average to differ from",
                repr(self.scaling_windows),
                "Try 6.",
            )
        if not self.scaling_target < 0.8:
            raise SettingError(
                "setting scaling_target",
                "lies between 0 and 0.8: a task is let 20 % above it, and must not work all the time even then",
                repr(self.scaling_target),
                "Try 0.7.",
            )
        if self.scaling != "off" and self.scaling_window < 2 * self.metrics_interval:
            raise SettingError(
                "setting scaling_window",
                f"is at least two reports of metrics_interval, {self.metrics_interval:g} s, long",
                repr(self.scaling_window),
                "Try 5.",
            )

    def _check_monitor(self) -> None:
        for name in ("node_cpu_limit", "node_memory_limit", "node_bandwidth_limit"):
            if getattr(self, name) > 1:
                raise SettingError(
                    f"setting {name}", "is a share, above 0 and up to 1", repr(getattr(self, name)), "Try 0.8."
                )
        if self.placement_fill > 1:
            raise SettingError(
                "setting placement_fill", "is a share, above 0 and up to 1", repr(self.placement_fill), "Try 0.9."
            )
        if self.monitored and self.monitor_window < 4 * self.metrics_interval:
            raise SettingError(
                "setting monitor_window",
                f"is at least four reports of metrics_interval, {self.metrics_interval:g} s, long",
                repr(self.monitor_window),
                "Try 30.",
            )
        try:
            watts = [float(part) for part in self.node_watts.split(",")]
        except ValueError:
            watts = []
        if len(watts) != 4 or not all(0 <= each < math.inf for each in watts):
            raise SettingError(
                "setting node_watts",
                "has four numbers of 0 or more: idle, CPU, memory, network",
                repr(self.node_watts),
                "For example 35,40,8,4.",
            )

    @property
    def monitored(self) -> bool:
        """Executors and the streams between them are watched: for a database, for people or for ERDM."""
        return self.monitor != "off" or self.placement == "erdm"

    def parse(self, assignments: Iterable[str]) -> Settings:
        """A copy with ``key=value`` texts applied; ``conf.NAME=value`` sets a value of the user's own."""
        changes: dict[str, Any] = {}
        conf = dict(self.conf)
        for text in assignments:
            key, sign, value = text.partition("=")
            if not sign:
                raise SettingError(f"--set {text}", "must read key=value", repr(text))
            if key.startswith("conf."):
                conf[key.removeprefix("conf.")] = _guess(value)
            else:
                changes[key] = _convert(key, value)
        return dataclasses.replace(self, conf=conf, **changes)


_KINDS: dict[str, type] = {
    spec.name: type(spec.default) for spec in dataclasses.fields(Settings) if spec.name != "conf"
}


def _convert(key: str, text: str) -> Any:
    kind = _KINDS.get(key)
    if kind is None:
        near = difflib.get_close_matches(key, _KINDS, 1)
        raise SettingError(
            f"setting {key}",
            "no such setting",
            "",
            f"Did you mean {near[0]}?" if near else "The settings are: " + ", ".join(sorted(_KINDS)) + ".",
        )
    if kind is bool:
        if text.lower() in ("true", "yes", "on", "1"):
            return True
        if text.lower() in ("false", "no", "off", "0"):
            return False
        raise SettingError(f"setting {key}", "takes true or false", repr(text))
    try:
        return kind(text)
    except ValueError:
        raise SettingError(f"setting {key}", f"takes a value of type {kind.__name__}", repr(text)) from None


def _guess(text: str) -> Any:
    """A user's own value: a number where it reads like one, else the text."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
