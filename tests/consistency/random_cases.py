"""Random topologies and a sequential oracle for them.

A case is drawn from its seed and is plain data: spouts, bolts, groupings, settings, and what happens while it runs
(crashes, other numbers of tasks, moves of workers, migration routes). Every bolt is a pure function of a row, so
the multiset of rows that each stream carries follows from the graph alone, whatever the order: ``expected``
computes it in one loop. Counting and reducing bolts are checked by what they emit.

The result of a window depends on the order of its input: a tuple may be late. So the rows of a case with windows
are divided into eras. The next era begins when everything of the last one is committed; within an era the lateness
covers every order. An era of closing rows, with one row for each key, ends all windows before it. Rows of the era
behind that one whose times are earlier are late, whatever their order.
"""

from __future__ import annotations

import datetime as dt
import random
import zlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from decimal import Decimal
from fractions import Fraction
from typing import Any
from uuid import UUID

from penstock.faults import STEPS
from tests.consistency.components import INTERVAL

OTHER = "other"
"""The second stream of components that have one."""
ERA = 12
"""Times of an era, from the first to the last."""
LATE_ROWS = 5
"""Of each task of a spout, in a case with late rows."""
MOST_ROWS = 250
"""Rows that all bolts of a case execute: a case takes about 0.1 s."""

# ---- keys ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    city: str
    number: float


BERLIN = dt.timezone(dt.timedelta(hours=2))
KEYS: dict[str, list[Any]] = {
    "text": ["a", "b", "", "ä", "a longer text than fits in eight bytes"],
    "integer": [0, 1, -1, 2**53, -(2**63), 2**63 - 1],
    "float": [0.0, -0.0, 1.0, 1.5, -1e300, float("inf")],
    "number": [0, 1, True, 1.0, 1 + 0j, Decimal(1), Fraction(1, 2), 0.5, -(2**63), 2**70, False, Decimal("0.5")],
    "tuple": [("a", 1), ("a", 1.0), ("b", 2), (("a", 1), None), ("a",), ()],
    "none": [None, "a", 0],
    "time": [
        dt.datetime(2026, 1, 1, 12, tzinfo=dt.UTC),
        dt.datetime(2026, 1, 1, 14, tzinfo=BERLIN),
        dt.datetime(2026, 1, 1, 13, tzinfo=dt.UTC),
        dt.datetime(2026, 1, 1, 12),
        dt.date(2026, 1, 1),
        dt.timedelta(seconds=90),
    ],
    "uuid": [UUID(int=1), UUID(int=2), UUID("00000000-0000-0000-0000-000000000001")],
    # 0, 8 and 16 collide: which comes first depends on which was put in first.
    "set": [frozenset([0, 8, 16]), frozenset([16, 8, 0]), frozenset([1, 2]), frozenset([2.0, 1.0]), frozenset()],
    "dataclass": [Place("a", 1), Place("a", 1.0), Place("b", 2)],
    "bytes": [b"a", b"", b"\x00\xff"],
}
"""Kind → values, equal ones among them."""
ODD_KINDS = ("number", "tuple", "time", "set", "dataclass")
"""Kinds with equal values that do not look alike. Drawn more often."""
ARROW_KINDS = ("text", "integer", "float", "bytes")
"""Kinds of which one Arrow column can hold all values: for batch spouts."""
_LABELS: dict[Any, str] = {}
for _values in KEYS.values():
    for _value in _values:
        _LABELS.setdefault(_value, repr(_value))


def label_of(key: Any) -> str:
    """The same text for all keys that are equal in Python."""
    return _LABELS[key]


def draws(id: str, sides: int, salt: str = "") -> int:
    """A number below ``sides`` that follows from the row alone."""
    return zlib.crc32((salt + id).encode()) % sides


# ---- a case as data --------------------------------------------------------------------------------------------


@dataclass
class Source:
    """A spout: every task emits ``count`` rows."""

    name: str
    form: str  # tuple or batch
    tasks: int
    count: int
    keys: str
    two_streams: bool

    @property
    def streams(self) -> list[str]:
        return ["default", OTHER] if self.two_streams else ["default"]


@dataclass(frozen=True)
class Windows:
    """The windows of a case, in units of its time field."""

    slide: int
    panes: int
    lateness: int
    late_rows: bool
    unit: float  # a power of two: the oracle computes with floats too

    @property
    def length(self) -> int:
        return self.slide * self.panes

    @property
    def apart(self) -> int:
        """From one era to the next: far enough that any row of the next ends all windows of this one."""
        return ERA + self.lateness + self.length

    def complete(self, era: int) -> int:
        """The last window that is complete once a closing row of that era has arrived."""
        return (era * self.apart - self.lateness) // self.slide


CLOSING, LATE = (2, 4), 3
"""Eras of closing rows, and of late ones between them."""


@dataclass
class Step:
    """A bolt."""

    name: str
    form: str  # basic, rich or batch
    does: str  # pass, twice, filter, split, both, pair, direct, count, tally, parts, merged, panes, windows
    tasks: int
    inputs: list[tuple[str, str, str]] = field(default_factory=list)  # component, stream, grouping
    flaky: bool = False
    by: tuple[str, ...] = ("key",)
    """The key of a Reduce."""

    @property
    def streams(self) -> list[str]:
        if self.does == "windows":
            return ["default", "late"]
        if self.does == "tally":
            return []
        return ["default", OTHER] if self.does in ("split", "both") else ["default"]

    @property
    def keeps(self) -> bool:
        """Does it have state?"""
        return self.does in ("count", "tally", "merged", "windows")

    @property
    def scalable(self) -> bool:
        """Does the number of its tasks change no row?"""
        return all(grouping not in ("all", "direct") for _, _, grouping in self.inputs)


@dataclass
class Case:
    seed: int
    delivery: str
    sources: list[Source]
    steps: list[Step]
    settings: dict[str, Any]
    events: list[tuple[str, Any]]
    windows: Windows | None = None

    @property
    def eras(self) -> int:
        if self.windows is None:
            return 1
        return 5 if self.windows.late_rows else 3

    def rows_until(self, source: Source, era: int) -> int:
        """How many rows each task of a spout has emitted when that era is over."""
        if self.windows is None:
            return source.count
        keys = len(KEYS[source.keys])
        ends = [source.count // 2, source.count]
        ends += [source.count + keys, source.count + keys + LATE_ROWS, source.count + 2 * keys + LATE_ROWS]
        return ends[era]

    def era_of(self, source: Source, n: int) -> int:
        return next(era for era in range(self.eras) if n < self.rows_until(source, era))

    def id_of(self, source: Source, task: int, n: int) -> str:
        """Closing rows end with a mark: no bolt filters them."""
        closing = self.windows is not None and self.era_of(source, n) in CLOSING
        return f"{source.name}.{task}.{n}{'!' if closing else ''}"

    def time_of(self, id: str) -> float:
        """The time of a row, which it has from the spout's row that it stems from."""
        root = id.partition("/")[0]
        if self.windows is None:
            return draws(root, 3, "time")
        name, _, n = root.rstrip("!").split(".")
        era = self.era_of(next(source for source in self.sources if source.name == name), int(n))
        if era in CLOSING:
            time = era * self.windows.apart
        elif era == LATE:
            first_in_time = self.windows.complete(CLOSING[0]) * self.windows.slide
            time = first_in_time - 1 - draws(root, self.windows.length + ERA, "time")
        else:
            time = era * self.windows.apart + draws(root, ERA, "time")
        return time * self.windows.unit

    def is_late(self, id: str) -> bool:
        name, _, n = id.partition("/")[0].rstrip("!").split(".")
        source = next(source for source in self.sources if source.name == name)
        return self.windows is not None and self.era_of(source, int(n)) == LATE

    @property
    def name(self) -> str:
        return f"case-{self.seed}"

    @property
    def disturbed(self) -> bool:
        """At least once: may rows come twice?"""
        restarts = any(event in ("kill", "crash", "rescale") for event, _ in self.events)
        return restarts or any(step.flaky for step in self.steps)

    def leaves(self) -> list[tuple[str, str]]:
        """⟨component, stream⟩ that no bolt reads."""
        read = {(component, stream) for step in self.steps for component, stream, _ in step.inputs}
        every = [(node.name, stream) for node in [*self.sources, *self.steps] for stream in node.streams]
        return [each for each in every if each not in read]


SINGLE = ("shuffle", "fields", "fields-id", "fields-both", "partial", "global", "none", "local", "custom")


NOBODYS = ("shuffle", "partial", "none", "local")
"""A key has no task of its own: when tasks become one, their values of it are merged."""


def draw_case(seed: int) -> Case:
    """The case of that seed."""
    draw = random.Random(seed)
    delivery = draw.choice(["exactly_once", "exactly_once", "at_least_once"])
    sources = [
        Source(
            f"spout{index}",
            draw.choice(["tuple", "tuple", "tuple", "batch"]),
            draw.randint(1, 2),
            draw.randint(5, 18),
            draw.choice([*KEYS, *ODD_KINDS, *ODD_KINDS, "tuple", "tuple", "tuple"]),
            draw.random() < 0.3,
        )
        for index in range(draw.randint(1, 2))
    ]
    for source in sources:
        if source.form == "batch":
            source.keys = draw.choice(ARROW_KINDS)
    steps: list[Step] = []
    if delivery == "at_least_once" and draw.random() < 0.3:
        steps += _draw_twins(draw, sources)
    for index in range(len(steps), max(len(steps), draw.randint(1, 3))):
        steps.append(_draw_step(draw, f"bolt{index}", sources, steps, delivery))
    windows = _draw_windows(draw) if draw.random() < 0.25 else None
    steps += _draw_ends(draw, sources, steps, windows is not None)
    case = Case(seed, delivery, sources, steps, _draw_settings(draw, delivery), [], windows)
    while _work(case) > MOST_ROWS and any(source.count > 1 for source in sources):
        for source in sources:
            source.count = max(1, source.count * 2 // 3)
    case.events = _draw_events(draw, case)
    return case


def _draw_step(draw: random.Random, name: str, sources: list[Source], steps: list[Step], delivery: str) -> Step:
    does = draw.choice(["pass", "pass", "twice", "filter", "split", "both", "direct"])
    form = draw.choice(["basic", "basic", "rich", "batch"])
    if delivery == "at_least_once" and draw.random() < 0.2:
        does, form = "pair", "rich"
    step = Step(name, form, does, draw.choice([1, 2, 2, 3]))
    step.flaky = delivery == "at_least_once" and draw.random() < 0.3
    every = [node for node in [*sources, *steps] for _ in node.streams]
    for node in {node.name: node for node in draw.sample(every, min(len(every), draw.randint(1, 2)))}.values():
        stream = draw.choice(node.streams)
        if isinstance(node, Step) and node.does == "direct":
            grouping = "direct"
        else:
            grouping = "all" if draw.random() < 0.1 else draw.choice(SINGLE)
        step.inputs.append((node.name, stream, grouping))
    return step


def _draw_twins(draw: random.Random, sources: list[Source]) -> list[Step]:
    """Two tuples of one root, a bolt that anchors what it emits to both, and one behind it that fails."""
    source = draw.choice(sources)
    first = [(source.name, draw.choice(source.streams), draw.choice(SINGLE))]
    return [
        Step("bolt0", draw.choice(["basic", "rich", "batch"]), "twice", draw.choice([1, 2]), first),
        Step(
            "bolt1", "rich", "pair", draw.choice([1, 2]), [("bolt0", "default", draw.choice(["fields", "global"]))]
        ),
        Step("bolt2", draw.choice(["basic", "rich"]), "pass", 2, [("bolt1", "default", "shuffle")], flaky=True),
    ]


def _draw_windows(draw: random.Random) -> Windows:
    slide = draw.randint(2, 6)
    return Windows(
        slide, draw.randint(1, 3), ERA + draw.randint(0, 5), draw.random() < 0.5, draw.choice([1, 0.25])
    )


def _draw_ends(draw: random.Random, sources: list[Source], steps: list[Step], windows: bool) -> list[Step]:
    """Bolts with state by key, behind one or two streams each."""
    ends: list[Step] = []
    inputs = [
        (node.name, stream)
        for node in [*sources, *steps]
        for stream in node.streams
        if not (isinstance(node, Step) and node.does == "direct")
    ]
    for index in range(draw.choice([1, 1, 2]) if windows else draw.choice([0, 1, 2, 2])):
        chosen = draw.sample(inputs, min(len(inputs), draw.randint(1, 2)))
        if windows and index == 0:
            any_way = [(component, stream, draw.choice(SINGLE)) for component, stream in chosen]
            ends.append(Step(f"panes{index}", "batch", "panes", draw.randint(2, 3), any_way))
            merged = [(f"panes{index}", "default", draw.choice(["fields", "fields", "global"]))]
            ends.append(Step(f"windows{index}", "batch", "windows", draw.randint(1, 4), merged))
        elif draw.random() < 0.3:
            some_way = [(component, stream, draw.choice(NOBODYS)) for component, stream in chosen]
            form = draw.choice(["basic", "rich", "batch"])
            ends.append(Step(f"tally{index}", form, "tally", draw.randint(1, 4), some_way))
        elif draw.random() < 0.6:
            by = [(component, stream, "fields") for component, stream in chosen]
            form = draw.choice(["basic", "rich", "batch"])
            ends.append(Step(f"count{index}", form, "count", draw.randint(1, 4), by))
        else:
            any_way = [(component, stream, draw.choice(SINGLE)) for component, stream in chosen]
            by = draw.choice([("key",), ("key",), ("key", "time"), ("time", "key")])
            ends.append(Step(f"parts{index}", "batch", "parts", draw.randint(2, 3), any_way, by=by))
            groupings = (
                ["fields", "fields", "global"] if len(by) == 1 else ["fields", "fields-time", "fields-key-time"]
            )
            merged = [(f"parts{index}", "default", draw.choice(groupings))]
            ends.append(Step(f"total{index}", "batch", "merged", draw.randint(1, 4), merged, by=by))
    return ends


def _draw_settings(draw: random.Random, delivery: str) -> dict[str, Any]:
    return {
        "delivery": delivery,
        "epoch_interval": INTERVAL,
        "flow": draw.choice(["step", "spout", "credit", "none"]),
        "inbox_capacity": draw.choice([1, 8, 16_384]),
        "overflow_bytes": draw.choice([0, 300, 1 << 20]),
        "frame_bytes": draw.choice([200, 2_000, 65_536]),
        "linger": draw.choice([0.0, 0.001]),
        "busy_linger": INTERVAL / 4,
        "message_timeout": 1.0,
        "migration": False,
    }


def _draw_events(draw: random.Random, case: Case) -> list[tuple[str, Any]]:
    events: list[tuple[str, Any]] = []
    kinds = ["kill", "crash", "rescale", "rescale", "rescale", "move", "move"]
    if any(step.does in ("parts", "panes") for step in case.steps):
        kinds += ["route", "route"]
    for _ in range(draw.choice([0, 1, 2, 3, 3, 4])):
        events.append(("run", draw.uniform(0.0, 0.02)))
        kind = draw.choice(kinds)
        if kind == "crash":
            events.append((kind, f"{draw.choice(STEPS)}:{draw.randint(1, 3)}"))
        elif kind == "rescale":
            often = {step.name: 0.9 if step.keeps else 0.4 for step in case.steps if step.scalable}
            events.append((kind, {name: draw.randint(1, 4) for name in often if draw.random() < often[name]}))
        else:
            events.append((kind, draw.randrange(1 << 30)))
    for _ in range(draw.randint(0, case.eras - 1)):
        events.insert(draw.randint(0, len(events)), ("next era", None))
    return events


# ---- the oracle ------------------------------------------------------------------------------------------------

Row = tuple[str, str]
"""⟨id, label of the key⟩"""


def source_rows(case: Case, source: Source) -> dict[str, Counter[Row]]:
    rows: dict[str, Counter[Row]] = {stream: Counter() for stream in source.streams}
    for task in range(source.tasks):
        for n in range(case.rows_until(source, case.eras - 1)):
            id = case.id_of(source, task, n)
            for stream in streams_of(source, id):
                rows[stream][id, label_of(key_of(source, n))] += 1
    return rows


def streams_of(source: Source, id: str) -> list[str]:
    if id.endswith("!"):
        return source.streams
    return [OTHER if source.two_streams and draws(id, 2) else "default"]


def key_of(source: Source, n: int) -> Any:
    values = KEYS[source.keys]
    return values[n * 7 % len(values)]


def outputs(step: Step, id: str) -> list[tuple[str, str]]:
    """⟨stream, id⟩ of what a bolt makes of a row."""
    match step.does:
        case "twice":
            return [("default", f"{id}/{step.name}a"), ("default", f"{id}/{step.name}b")]
        case "filter":
            return [("default", f"{id}/{step.name}")] if draws(id, 3, step.name) or "!" in id else []
        case "split" if "!" not in id:
            return [(OTHER if draws(id, 2, step.name) else "default", f"{id}/{step.name}")]
        case "both" | "split":
            return [("default", f"{id}/{step.name}"), (OTHER, f"{id}/{step.name}")]
        case _:
            return [("default", f"{id}/{step.name}")]


def expected(case: Case) -> dict[tuple[str, str], Counter[Any]]:
    """⟨component, stream⟩ → rows; of counting bolts ⟨label, times⟩, of merging ones ⟨key…, count, sum⟩, of windows
    ⟨label, window's end or pane, count, sum⟩. ⟨component, "state"⟩ → what a tallying bolt keeps."""
    rows: dict[tuple[str, str], Counter[Any]] = {}
    for source in case.sources:
        rows.update({(source.name, stream): found for stream, found in source_rows(case, source).items()})
    for step in case.steps:
        arrives: Counter[Row] = Counter()
        for component, stream, grouping in step.inputs:
            for row, times in rows[component, stream].items():
                arrives[row] += times * (step.tasks if grouping == "all" else 1)
        rows.update({(step.name, stream): Counter() for stream in step.streams})
        if step.does == "tally":
            rows[step.name, "state"] = _totals(arrives)
        elif step.does == "count":
            by_key = _totals(arrives)
            rows[step.name, "default"] = Counter(
                (key, n) for key, most in by_key.items() for n in range(1, most + 1)
            )
        elif step.does in ("parts", "panes"):
            rows[step.name, "default"] = arrives  # what its parts are made of
        elif step.does == "merged":
            rows[step.name, "default"] = _merged(
                (tuple(label if field == "key" else case.time_of(id) for field in step.by), id, times)
                for (id, label), times in arrives.items()
            )
        elif step.does == "windows":
            rows[step.name, "default"], rows[step.name, "late"] = _windows(case, arrives)
        else:
            for (id, key), times in arrives.items():
                for stream, new in outputs(step, id):
                    rows[step.name, stream][new, key] += times
    return rows


def _merged(rows: Iterable[tuple[tuple[Any, ...], str, int]]) -> Counter[Any]:
    """Of ⟨key, id, times⟩ one ⟨key…, count, sum of the lengths of ids⟩ for each key."""
    counts: Counter[Any] = Counter()
    weights: Counter[Any] = Counter()
    for key, id, times in rows:
        counts[key] += times
        weights[key] += times * len(id)
    return Counter((*key, n, weights[key]) for key, n in counts.items())


def _windows(case: Case, arrives: Counter[Row]) -> tuple[Counter[Any], Counter[Any]]:
    """The results of all windows that are over at the end, and what came too late."""
    windows = case.windows
    assert windows is not None
    first, last = windows.complete(CLOSING[0]), windows.complete(case.eras - 1)
    in_time, late = [], []
    for (id, label), times in arrives.items():
        pane = int(case.time_of(id) / windows.unit) // windows.slide
        begin = pane + 1
        if case.is_late(id):
            late.append(((label, pane), id, times))
            begin = max(begin, first + 1)
        for window in range(begin, min(pane + windows.panes, last) + 1):
            in_time.append(((label, window * windows.slide * windows.unit), id, times))
    return _merged(in_time), _merged(late)


def targets_of(case: Case, step: Step) -> list[str]:
    """The bolts that read a step's direct stream, or the sink behind it."""
    bolts = [each.name for each in case.steps for component, _, _ in each.inputs if component == step.name]
    return bolts or [f"sink{case.leaves().index((step.name, 'default'))}"]


def _totals(rows: Counter[Row]) -> Counter[str]:
    totals: Counter[str] = Counter()
    for (_, key), times in rows.items():
        totals[key] += times
    return totals


def _work(case: Case) -> int:
    return sum(rows.total() for rows in expected(case).values())
