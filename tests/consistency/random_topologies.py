"""Builds, runs and judges the cases of ``random_cases``.

``python -m tests.consistency.random_topologies --seed 17`` runs one case, ``--cases 10000 --jobs 2`` many.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import fsspec

from penstock import (
    BasicBolt,
    BatchBolt,
    BatchSpout,
    CustomGrouping,
    Reduce,
    RichBolt,
    Settings,
    Spout,
    Topology,
    TopologyBuilder,
    signing,
)
from penstock.columns import to_values
from penstock.merging import Count as Counting
from penstock.merging import Sum
from penstock.state.maps import whole_key
from penstock.testing import LocalRunner
from tests.consistency.components import INTERVAL, WORLDS, Crash, Outside, World, die
from tests.consistency.random_cases import (
    Case,
    Source,
    Step,
    draw_case,
    draws,
    expected,
    key_of,
    label_of,
    outputs,
    stream_of,
    targets_of,
)

# ---- components ------------------------------------------------------------------------------------------------

FAILED: dict[str, set[str]] = {}
"""Case → rows that have failed once, by ⟨bolt, id⟩: they do not fail again."""


class TupleSource(Spout):
    """Position in state; at least once below it all is acked, and what fails is emitted again."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def declare_output_fields(self, declarer):
        for stream in self._source.streams:
            declarer.declare(("id", str), "key", stream=stream)

    def open(self, conf, context, collector):
        self._collector, self._index = collector, context.index
        self._acks = context.delivery == "at_least_once"
        self._low = context.state.value("position", 0)
        self._next = self._low.value
        self._open: set[int] = set()
        self._rests = False

    def next_tuple(self):
        self._rests = not self._rests
        if self._rests:
            return
        for n in range(self._next, min(self._next + 4, self._source.count)):
            self._open.add(n)
            self._emit(n)
            self._next = n + 1
        if not self._acks:
            self._low.value = self._next

    def before_snapshot(self):
        if self._acks:
            self._low.value = min(self._open, default=self._next)

    def ack(self, msg_id):
        self._open.discard(msg_id)

    def fail(self, msg_id, failure):
        self._emit(msg_id)

    @property
    def done(self):
        return self._next == self._source.count and not (self._acks and self._open)

    def _emit(self, n):
        id = f"{self._source.name}.{self._index}.{n}"
        self._collector.emit([id, key_of(self._source, n)], stream=stream_of(self._source, id), msg_id=n)


class BatchSource(BatchSpout):
    """The same in batches."""

    def __init__(self, source: Source) -> None:
        self._source = source

    declare_output_fields = TupleSource.declare_output_fields
    open = TupleSource.open
    before_snapshot = TupleSource.before_snapshot
    ack = TupleSource.ack
    done = TupleSource.done

    def next_batch(self):
        self._rests = not self._rests
        numbers = range(self._next, min(self._next + 5, self._source.count))
        if self._rests or not numbers:
            return
        self._open.update(numbers)
        self._next = numbers[-1] + 1
        self._emit(numbers)
        if not self._acks:
            self._low.value = self._next

    def fail(self, msg_id, failure):
        self._emit([msg_id])

    def _emit(self, numbers):
        ids = {n: f"{self._source.name}.{self._index}.{n}" for n in numbers}
        for stream in self._source.streams:
            here = [n for n in numbers if stream_of(self._source, ids[n]) == stream]
            if here:
                columns = [[ids[n] for n in here], [key_of(self._source, n) for n in here]]
                self._collector.emit_batch(columns, stream=stream, msg_ids=here)


class _Worker:
    """What the three forms of bolt share."""

    def __init__(self, case: str, step: Step, targets: Sequence[str]) -> None:
        """``targets``: the bolts that it emits to directly."""
        self._case, self._step, self._targets = case, step, targets

    def declare_output_fields(self, declarer):
        if self._step.does == "count":
            declarer.declare(("key", str), ("times", int))
            return
        for stream in self._step.streams:
            declarer.declare(("id", str), "key", stream=stream, direct=self._step.does == "direct")

    def _prepare(self, context):
        self._tasks = [context.tasks[component] for component in self._targets]
        self._counts = context.state.map("counts", 0, owner=whole_key) if self._step.does == "count" else None

    def _check(self, id):
        failed = FAILED[self._case]
        name = f"{self._step.name} {id}"
        if self._step.flaky and not draws(id, 5) and name not in failed:
            failed.add(name)
            raise ValueError("fails once")

    def _count(self, key):
        self._counts[key] += 1
        return [label_of(key), self._counts[key]]

    def _made(self, id, key):
        """⟨values, stream, task or None⟩ of what the bolt makes of a row."""
        self._check(id)
        if self._step.does == "count":
            yield self._count(key), "default", None
            return
        for stream, new in outputs(self._step, id):
            if not self._tasks:
                yield [new, key], stream, None
            for tasks in self._tasks:
                yield [new, key], stream, tasks[draws(id, len(tasks))]


class Basic(_Worker, BasicBolt):
    def prepare(self, conf, context):
        self._prepare(context)

    def execute(self, tup, collector):
        for values, stream, task in self._made(tup.id, tup.key):
            if task is None:
                collector.emit(values, stream=stream)
            else:
                collector.emit_direct(task, values, stream=stream)


class Rich(_Worker, RichBolt):
    """``pair`` holds a tuple until the next one comes, or a tick, and anchors what it emits to both."""

    tick_interval = 0.003

    def prepare(self, conf, context, collector):
        self._prepare(context)
        self._collector = collector
        self._held = []

    def execute(self, tup):
        if not tup.is_tick:
            try:
                self._check(tup.id)
            except ValueError as error:
                self._collector.fail(tup, str(error))
                return
            self._held.append(tup)
        if tup.is_tick or self._step.does != "pair" or len(self._held) == 2:
            held, self._held = self._held, []
            for each in held:
                self._emit(each, held)
            for each in held:
                self._collector.ack(each)

    def _emit(self, tup, anchors):
        for values, stream, task in self._made(tup.id, tup.key):
            if task is None:
                self._collector.emit(values, stream=stream, anchors=anchors)
            else:
                self._collector.emit_direct(task, values, stream=stream, anchors=anchors)


class Batch(_Worker, BatchBolt):
    def prepare(self, conf, context):
        self._prepare(context)

    def execute_batch(self, batch, source, collector):
        ids, keys = batch.column("id").to_pylist(), batch.column("key")
        for id in ids:
            self._check(id)
        made: dict[tuple[str, int | None], tuple[list[Any], list[int]]] = {}
        values = to_values(keys)
        for row, (id, key) in enumerate(zip(ids, values, strict=True)):
            for new, stream, task in self._made(id, key):
                first, rows = made.setdefault((stream, task), ([], []))
                first.append(new)
                rows.append(row)
        for (stream, task), (new, rows) in made.items():
            columns = list(map(list, zip(*new, strict=True)))
            if self._counts is None:
                columns[1] = keys.take(rows)
            if task is None:
                collector.emit_batch(columns, stream=stream, anchors=rows)
            else:
                collector.emit_batch_direct(task, columns, stream=stream, anchors=rows)


class ById(CustomGrouping):
    def prepare(self, targets):
        self._tasks = targets.tasks

    def choose(self, values):
        return [self._tasks[draws(values[0], len(self._tasks))]]


class RowSink(Outside):
    """Writes rows with the label of their key."""

    commit_interval = 0.002

    def write(self, batch, source):
        columns = {name: to_values(column) for name, column in zip(batch.schema.names, batch.columns, strict=True)}
        if "times" not in columns:  # else the key is a label already
            columns["key"] = list(map(label_of, columns["key"]))
        self._rows += [(source.component, source.stream, *row) for row in zip(*columns.values(), strict=True)]


class IdLength(Sum):
    """Adds up the lengths of ids."""

    def add(self, part, value):
        return part + len(value)

    def total(self, values):
        return sum(map(len, values))


# ---- building and running --------------------------------------------------------------------------------------


def build(case: Case, tasks: dict[str, int], crash_at: str = "") -> Topology:
    """The topology of a case, with these numbers of tasks where they are named."""
    builder = TopologyBuilder()
    for source in case.sources:
        made = TupleSource(source) if source.form == "tuple" else BatchSource(source)
        builder.set_spout(source.name, made, source.tasks)
    forms = {"basic": Basic, "rich": Rich, "batch": Batch}
    reduce = Reduce("key", rows=Counting(), weight=IdLength("id"))
    for step in case.steps:
        if step.does == "parts":
            bolt = reduce.parts()
        elif step.does == "merged":
            bolt = reduce.merged()
        else:
            targets = targets_of(case, step) if step.does == "direct" else []
            bolt = forms[step.form](case.name, step, targets)
        declarer = builder.set_bolt(step.name, bolt, tasks.get(step.name, step.tasks))
        for component, stream, grouping in step.inputs:
            _group(declarer, component, stream, grouping)
    for index, (component, stream) in enumerate(case.leaves()):
        declarer = builder.set_bolt(f"sink{index}", RowSink(case.name), 1 + index % 2)
        node = next((step for step in case.steps if step.name == component), None)
        _group(declarer, component, stream, "direct" if node and node.does == "direct" else "shuffle")
    return builder.build("t", Settings(**{**case.settings, "crash_at": crash_at}))


def _group(declarer: Any, component: str, stream: str, grouping: str) -> None:
    fields = {"fields": ["key"], "fields-id": ["id"], "fields-both": ["id", "key"], "partial": ["key"]}
    match grouping:
        case "fields" | "fields-id" | "fields-both":
            declarer.fields_grouping(component, *fields[grouping], stream=stream)
        case "partial":
            declarer.partial_key_grouping(component, *fields[grouping], stream=stream)
        case "custom":
            declarer.grouping(component, ById(), stream)
        case "local":
            declarer.local_or_shuffle_grouping(component, stream=stream)
        case _:
            getattr(declarer, f"{grouping}_grouping")(component, stream=stream)


class Run:
    """A case while it runs."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self._folder = f"memory://random/{case.name}"
        self._tasks: dict[str, int] = {}
        self._starts = 0
        WORLDS[case.name], FAILED[case.name] = World(), set()
        self._runner = self._start()

    def _start(self, crash_at: str = "") -> LocalRunner:
        self._starts += 1
        topology = build(self.case, self._tasks, crash_at)
        seed = self.case.seed * 31 + self._starts
        return LocalRunner(topology, seed=seed, folder=self._folder, die=die, uneven=True)

    def happens(self, event: str, what: Any) -> None:
        """Carry out one event. A crash that was announced by an earlier one may come now."""
        try:
            self._carry_out(event, what)
        except Crash:
            self._runner = self._start()

    def _carry_out(self, event: str, what: Any) -> None:
        runner = self._runner
        match event:
            case "run":
                runner.run(what)
            case "kill":
                self._runner = self._start()
            case "crash":
                step, _, ahead = what.partition(":")
                self._runner = self._start(f"{step}:{runner.commits.committed + int(ahead)}")
                self._runner.run(0.02)
            case "rescale":
                self._tasks |= what
                self._runner = self._start()
            case "move":
                slots = [slot for slot in runner.plan.slot_ids() if slot.stage]
                runner.move(slots[what % len(slots)])
            case "route":
                self._route(random.Random(what))

    def _route(self, draw: random.Random) -> None:
        for step in self.case.steps:
            if step.does == "parts":
                tasks = range(len(self._runner.plan.tasks_of[step.name]))
                heavy = draw.sample(tasks, draw.randrange(len(tasks)))
                light = [task for task in tasks if task not in heavy]
                self._runner.reroute(step.name, {task: draw.choice(light) for task in heavy})

    def finish(self) -> list[tuple[Any, ...]]:
        """Run to the end; returns all rows that sinks hold."""
        try:
            return self._finish()
        except Crash:
            self._runner = self._start()
            return self._finish()

    def _finish(self) -> list[tuple[Any, ...]]:
        runner = self._runner
        spouts = [spout for source in self.case.sources for spout in runner.component(source.name)]
        self._until(lambda: all(spout.done for spout in spouts))
        runner.run_until_idle()
        last = runner.commits.newest
        self._until(lambda: runner.commits.published > last)
        if not any(step.flaky for step in self.case.steps):
            assert not runner.errors, f"{len(runner.errors)} errors, the first: {runner.errors[0]}"
        runner.close()
        return WORLDS[self.case.name].rows

    def _until(self, condition: Callable[[], bool]) -> None:
        end = self._runner.clock.now() + 5.0  # simulated seconds: many times what a case takes, time-outs included
        while not condition():
            assert self._runner.clock.now() < end, f"stuck: {[str(error) for error in self._runner.errors[:2]]}"
            self._runner.run(INTERVAL)

    def forget(self) -> None:
        """Remove all it has left in memory."""
        WORLDS.pop(self.case.name, None)
        FAILED.pop(self.case.name, None)
        files = fsspec.filesystem("memory")
        if files.exists(self._folder):
            files.rm(self._folder, recursive=True)


def run_case(seed: int) -> None:
    """Run the case of that seed. Raises ``AssertionError`` where the outcome is not the oracle's."""
    case = draw_case(seed)
    run = Run(case)
    try:
        for event, what in case.events:
            run.happens(event, what)
        judge(case, run.finish())
    finally:
        run.forget()


def judge(case: Case, rows: Sequence[tuple[Any, ...]]) -> None:
    """Compare what the sinks hold with the oracle."""
    found: dict[tuple[str, str], Counter[Any]] = {leaf: Counter() for leaf in case.leaves()}
    for component, stream, *row in rows:
        found[component, stream][tuple(row)] += 1
    oracle = expected(case)
    does = {step.name: step.does for step in case.steps}
    exact = case.delivery == "exactly_once" or not case.disturbed
    for leaf in case.leaves():
        wanted, got = oracle[leaf], found[leaf]
        if does.get(leaf[0]) == "merged":  # it emits what it has so far: the largest is the last
            last = {}
            for key, *totals in got:
                last[key] = max(last.get(key, ()), tuple(totals))
            totals = {key: tuple(totals) for key, *totals in wanted}
            if exact:
                assert last == totals, f"{leaf}"
            else:
                assert last.keys() == totals.keys(), f"{leaf}"
                assert all(last[key] >= totals[key] for key in totals), f"{leaf}"
        elif exact:
            assert got == wanted, f"{leaf}: lost {wanted - got}, wrong or double {got - wanted}"
        elif does.get(leaf[0]) == "count":  # replayed rows are counted again
            most = {key: max(times for each, times in got if each == key) for key, _ in got}
            least = {key: max(times for each, times in wanted if each == key) for key, _ in wanted}
            assert most.keys() == least.keys(), f"{leaf}"
            assert all(most[key] >= least[key] for key in least), f"{leaf}: {most}, {least} rows came"
        else:
            assert got.keys() == wanted.keys(), (
                f"{leaf}: lost {wanted.keys() - got.keys()}, wrong {got.keys() - wanted.keys()}"
            )


# ---- many cases ------------------------------------------------------------------------------------------------


def outcome(seed: int) -> tuple[int, str]:
    """The seed, and what went wrong with its case; an empty text where nothing did."""
    try:
        run_case(seed)
    except Exception:  # a case may fail in any way, and all seeds that do are wanted
        return seed, traceback.format_exc()
    return seed, ""


def main() -> int:
    parser = argparse.ArgumentParser(description="Run random topologies against a sequential oracle.")
    parser.add_argument("--seed", type=int, default=0, help="of the first case")
    parser.add_argument("--cases", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--json", type=Path, help="where to write a report")
    options = parser.parse_args()
    wrong, begun = {}, time.monotonic()
    seeds = range(options.seed, options.seed + options.cases)
    with tempfile.TemporaryDirectory() as folder:
        os.environ[signing.KEY_FILE] = f"{folder}/key"  # before the processes are started: they inherit it
        with multiprocessing.Pool(options.jobs) as pool:
            for done, (seed, error) in enumerate(pool.imap_unordered(outcome, seeds, 5), 1):
                if error:
                    wrong[seed] = error.splitlines()[-1]
                    print(f"seed {seed}: {error}", flush=True)
                if done % 500 == 0:
                    print(f"{done} cases, {len(wrong)} wrong, {time.monotonic() - begun:.0f} s", flush=True)
    print(f"{len(wrong)} of {options.cases} wrong, in {time.monotonic() - begun:.0f} s")
    if options.json:
        bars = {"random.cases": options.cases, "random.wrong": len(wrong)}
        report = {
            "seeds": [seeds[0], seeds[-1]],
            "wrong": wrong,
            "bars": [{"name": name, "value": value, "unit": "cases"} for name, value in bars.items()],
        }
        options.json.parent.mkdir(exist_ok=True)
        options.json.write_text(json.dumps(report, indent=1))
    return bool(wrong)


if __name__ == "__main__":  # under its own name: classes of __main__ are pickled with copies of its tables
    from tests.consistency import random_topologies

    sys.exit(random_topologies.main())
