"""Builds, runs and judges the cases of ``random_cases``.

``python -m tests.consistency.random_topologies --seed 17`` runs one case, ``--cases 10000 --jobs 2`` many.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import operator
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import fsspec

from penstock import (
    BasicBolt,
    BatchBolt,
    BatchSpout,
    CustomGrouping,
    Reduce,
    RichBolt,
    Spout,
    StateError,
    Topology,
    TopologyBuilder,
    signing,
)
from penstock.aggregates import Count as Counting
from penstock.aggregates import Sum
from penstock.columns import to_values
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
    streams_of,
    targets_of,
)
from tests.helpers import settings_with

# ---- components ------------------------------------------------------------------------------------------------

FAILED: dict[str, set[str]] = {}
"""Case → rows that have failed once, by ⟨bolt, id⟩: they do not fail again."""
ERAS: dict[str, int] = {}
"""Case → the era whose rows spouts may emit."""


class TupleSource(Spout):
    """Position in state; at least once below it all is acked, and what fails is emitted again."""

    def __init__(self, case: Case, source: Source) -> None:
        self._case, self._source = case, source

    def declare_output_fields(self, declarer):
        for stream in self._source.streams:
            declarer.declare(("id", str), "key", "time", stream=stream)

    def open(self, conf, context, collector):
        self._collector, self._index = collector, context.index
        self._acks = context.delivery == "at_least_once"
        self._low = context.state.value("position", 0)
        self._next = self._low.value
        self._open: set[tuple[int, str]] = set()
        self._rests = False

    def next_tuple(self):
        self._rests = not self._rests
        if self._rests:
            return
        for n in range(self._next, min(self._next + 4, self._end)):
            for stream in self._streams(n):
                self._open.add((n, stream))
                self._emit(n, stream)
            self._next = n + 1
        if not self._acks:
            self._low.value = self._next

    def before_snapshot(self):
        if self._acks:
            self._low.value = min((n for n, _ in self._open), default=self._next)

    def ack(self, msg_id):
        self._open.discard(msg_id)

    def fail(self, msg_id, failure):
        self._emit(*msg_id)

    @property
    def done(self):
        return self._next == self._end and not (self._acks and self._open)

    @property
    def _end(self):
        return self._case.rows_until(self._source, ERAS[self._case.name])

    def _streams(self, n):
        return streams_of(self._source, self._case.id_of(self._source, self._index, n))

    def _values(self, n):
        id = self._case.id_of(self._source, self._index, n)
        return [id, key_of(self._source, n), self._case.time_of(id)]

    def _emit(self, n, stream):
        self._collector.emit(self._values(n), stream=stream, msg_id=(n, stream))


class BatchSource(BatchSpout):
    """The same in batches."""

    __init__ = TupleSource.__init__
    declare_output_fields = TupleSource.declare_output_fields
    open = TupleSource.open
    before_snapshot = TupleSource.before_snapshot
    ack = TupleSource.ack
    done, _end = TupleSource.done, TupleSource._end
    _streams, _values = TupleSource._streams, TupleSource._values

    def next_batch(self):
        self._rests = not self._rests
        numbers = range(self._next, min(self._next + 5, self._end))
        if self._rests or not numbers:
            return
        self._next = numbers[-1] + 1
        for stream in self._source.streams:
            ids = [(n, stream) for n in numbers if stream in self._streams(n)]
            if ids:
                self._open.update(ids)
                self._emit(ids)
        if not self._acks:
            self._low.value = self._next

    def fail(self, msg_id, failure):
        self._emit([msg_id])

    def _emit(self, ids):
        columns = list(map(list, zip(*(self._values(n) for n, _ in ids), strict=True)))
        self._collector.emit_batch(columns, stream=ids[0][1], msg_ids=ids)


class _Worker:
    """What the three forms of bolt share."""

    def __init__(self, case: str, step: Step, targets: Sequence[str]) -> None:
        """``targets``: the bolts that it emits to directly."""
        self._case, self._step, self._targets = case, step, targets

    def declare_output_fields(self, declarer):
        if self._step.does == "tally":
            return
        if self._step.does == "count":
            declarer.declare(("key", str), ("times", int))
            return
        for stream in self._step.streams:
            declarer.declare(("id", str), "key", "time", stream=stream, direct=self._step.does == "direct")

    def _prepare(self, context):
        self._tasks = [context.tasks[component] for component in self._targets]
        self._counts = None
        if self._step.does == "count":
            self._counts = context.state.map("counts", 0, owner=whole_key)
        elif self._step.does == "tally":
            self.tally = context.state.map("tally", 0, merge=operator.add)
            self.rows = context.state.value("rows", 0, merge=operator.add)

    def _check(self, id):
        failed = FAILED[self._case]
        name = f"{self._step.name} {id}"
        if self._step.flaky and not draws(id, 5) and name not in failed:
            failed.add(name)
            raise ValueError("fails once")

    def _count(self, key):
        self._counts[key] += 1
        return [label_of(key), self._counts[key]]

    def _made(self, id, key, time):
        """⟨values, stream, task or None⟩ of what the bolt makes of a row."""
        self._check(id)
        if self._step.does == "tally":
            self.tally[key] += 1
            self.rows.value += 1
            return
        if self._step.does == "count":
            yield self._count(key), "default", None
            return
        for stream, new in outputs(self._step, id):
            if not self._tasks:
                yield [new, key, time], stream, None
            for tasks in self._tasks:
                yield [new, key, time], stream, tasks[draws(id, len(tasks))]


class Basic(_Worker, BasicBolt):
    def prepare(self, conf, context):
        self._prepare(context)

    def execute(self, tup, collector):
        for values, stream, task in self._made(tup.id, tup.key, tup.time):
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
        for values, stream, task in self._made(tup.id, tup.key, tup.time):
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
        rows_of = zip(ids, to_values(keys), to_values(batch.column("time")), strict=True)
        for row, values in enumerate(rows_of):
            for new, stream, task in self._made(*values):
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
        # A key is a label already where a bolt has counted it.
        columns = {name: to_values(column) for name, column in zip(batch.schema.names, batch.columns, strict=True)}
        if "times" not in columns:
            columns["key"] = list(map(label_of, columns["key"]))
        self._rows += [(source.component, source.stream, *row) for row in zip(*columns.values(), strict=True)]


class IdLength(Sum):
    """Adds up the lengths of ids."""

    def add(self, part, value):
        return part + len(value)

    def total(self, values):
        return sum(map(len, values))


# ---- building and running --------------------------------------------------------------------------------------


def build(case: Case, tasks: dict[str, int], crash_at: str = "", overtake_after: float = 2.0) -> Topology:
    """The topology of a case, with these numbers of tasks where they are named."""
    builder = TopologyBuilder()
    for source in case.sources:
        made = TupleSource(case, source) if source.form == "tuple" else BatchSource(case, source)
        builder.set_spout(source.name, made, source.tasks)
    forms = {"basic": Basic, "rich": Rich, "batch": Batch}
    for step in case.steps:
        if step.does in ("parts", "panes"):
            bolt = _reduce(case, step).partials()
        elif step.does in ("merged", "windows"):
            bolt = _reduce(case, step).merged()
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
    more = {"crash_at": crash_at, "overtake_after": overtake_after}
    return builder.build("t", settings_with(**{**case.settings, **more}))


def _reduce(case: Case, step: Step) -> Reduce:
    reduce = Reduce(*step.by, rows=Counting(), weight=IdLength("id"))
    if step.does in ("parts", "merged"):
        return reduce
    windows = case.windows
    assert windows is not None
    times = (windows.length, windows.slide, windows.lateness)
    return reduce.window("time", *(time * windows.unit for time in times))


def _group(declarer: Any, component: str, stream: str, grouping: str) -> None:
    fields = {
        "fields": ["key"],
        "fields-id": ["id"],
        "fields-both": ["id", "key"],
        "fields-time": ["time"],
        "fields-key-time": ["key", "time"],
    }
    match grouping:
        case _ if grouping in fields:
            declarer.fields_grouping(component, *fields[grouping], stream=stream)
        case "partial":
            declarer.partial_key_grouping(component, "key", stream=stream)
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
        WORLDS[case.name], FAILED[case.name], ERAS[case.name] = World(), set(), 0
        self._runner = self._start()

    def _start(self, crash_at: str = "") -> LocalRunner:
        self._starts += 1
        seed = self.case.seed * 31 + self._starts
        # Drawn apart from the case, so that cases stay what they were: from always to never, with exactly once.
        overtake_after = random.Random(f"{seed} overtakes").choice([0.0, INTERVAL / 4, INTERVAL, 2.0])
        topology = build(self.case, self._tasks, crash_at, overtake_after)
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
                self._rescale(what)
            case "move":
                workers = [worker for worker in runner.plan.worker_ids() if worker.stage]
                runner.move(workers[what % len(workers)])
            case "route":
                self._route(random.Random(what))
            case "next era":
                self._next_era()

    def _rescale(self, tasks: dict[str, int]) -> None:
        """If tuples wait that would have no task then, do what the error asks for: end it as it was, first."""
        before = self._tasks
        self._tasks = {**before, **tasks}
        try:
            self._runner = self._start()
            return
        except StateError as error:
            if "tuples wait for it" not in str(error):
                raise
        self._tasks = before
        runner = self._runner = self._start()
        runner.deactivate()
        runner.run_until_idle(5.0)
        last = runner.commits.newest
        self._until(lambda: runner.commits.published > last)
        self._tasks = {**before, **tasks}
        self._runner = self._start()

    def _route(self, draw: random.Random) -> None:
        for step in self.case.steps:
            if step.does in ("parts", "panes"):
                tasks = range(len(self._runner.plan.tasks_of[step.name]))
                heavy = draw.sample(tasks, draw.randrange(len(tasks)))
                light = [task for task in tasks if task not in heavy]
                self._runner.reroute(step.name, {task: draw.choice(light) for task in heavy})

    def _next_era(self) -> None:
        self._settle()
        ERAS[self.case.name] += 1

    def finish(self) -> list[tuple[Any, ...]]:
        """Run to the end; returns all rows that sinks hold."""
        while ERAS[self.case.name] < self.case.eras - 1:
            self.happens("next era", None)
        try:
            self._settle(2)
        except Crash:
            self._runner = self._start()
            self._settle(2)
        if not any(step.flaky for step in self.case.steps):
            errors = self._runner.errors
            assert not errors, f"{len(errors)} errors, the first: {errors[0]}"
        self._runner.close()
        return WORLDS[self.case.name].rows

    def judge_state(self) -> None:
        """Compare what bolts keep, over all their tasks, with the oracle."""
        oracle = expected(self.case)
        exact = self.case.delivery == "exactly_once" or not self.case.disturbed
        for step in self.case.steps:
            if step.does == "tally":
                bolts = self._runner.component(step.name)
                found: Counter[str] = Counter()
                for bolt in bolts:
                    for key, times in bolt.tally.items():
                        found[label_of(key)] += times
                totals = {(key,): (times,) for key, times in found.items()}
                wanted = {(key,): (times,) for key, times in oracle[step.name, "state"].items()}
                _compare((step.name, "state"), totals, wanted, exact)
                rows = sum(bolt.rows.value for bolt in bolts)
                assert rows == found.total() or not exact, f"{step.name}: {rows} rows, {found.total()} by key"

    def _settle(self, epochs: int = 1) -> None:
        """Run until all that spouts may emit is emitted and committed: until they are done (at least once: all is
        acked), and the first epoch that begins after that is published. The end waits for one epoch more, whose
        rows are then wrong: rows that came behind the markers of theirs."""
        runner = self._runner
        spouts = [spout for source in self.case.sources for spout in runner.component(source.name)]
        self._until(lambda: all(spout.done for spout in spouts))
        if self.case.delivery == "exactly_once":
            runner.run_until_idle(5.0)  # an epoch may end before all its tuples are processed
        for _ in range(epochs):
            last = runner.commits.newest
            self._until(lambda last=last: runner.commits.published > last)

    def _until(self, condition: Callable[[], bool]) -> None:
        end = self._runner.clock.now() + 5.0  # simulated seconds: many times what a case takes, time-outs included
        while not condition():
            assert self._runner.clock.now() < end, f"stuck: {[str(error) for error in self._runner.errors[:2]]}"
            self._runner.run(INTERVAL)

    def forget(self) -> None:
        """Remove all it has left in memory."""
        WORLDS.pop(self.case.name, None)
        FAILED.pop(self.case.name, None)
        ERAS.pop(self.case.name, None)
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
        run.judge_state()
    finally:
        run.forget()


def judge(case: Case, rows: Sequence[tuple[Any, ...]]) -> None:
    """Compare what the sinks hold with the oracle."""
    found: dict[tuple[str, str], Counter[Any]] = {leaf: Counter() for leaf in case.leaves()}
    does = {step.name: step.does for step in case.steps}
    for component, stream, *row in rows:
        if does.get(component) not in ("count", "merged", "windows"):
            id, _, time = row
            assert time == case.time_of(id), f"{component}: {id} has the time {time}"
            del row[2]
        found[component, stream][tuple(row)] += 1
    oracle = expected(case)
    exact = case.delivery == "exactly_once" or not case.disturbed
    for leaf in case.leaves():
        wanted, got = oracle[leaf], found[leaf]
        if leaf[1] == "late":  # it has parts: how a key's tuples are divided into them depends on the order
            got = _added(got)
        totals = 1 if does.get(leaf[0]) == "count" else 2
        if does.get(leaf[0]) == "merged":  # it emits what it has so far: the largest is the last
            _compare(leaf, _largest(got, totals), _largest(wanted, totals), exact)
        elif exact:
            assert got == wanted, f"{leaf}: lost {wanted - got}, wrong or double {got - wanted}"
        elif does.get(leaf[0]) in ("count", "windows"):  # replayed rows are counted again
            if does[leaf[0]] == "windows" and leaf[1] == "default":
                # A window is emitted once. What is lost of that is not emitted again: its state is of a time when
                # the window was over already. See "Use windows" in docs/how-to/aggregate.md.
                came = {row[:-totals] for row in got}
                wanted = Counter({row: 1 for row in wanted if row[:-totals] in came})
            _compare(leaf, _largest(got, totals), _largest(wanted, totals), exact)
        else:
            assert got.keys() == wanted.keys(), (
                f"{leaf}: lost {wanted.keys() - got.keys()}, wrong {got.keys() - wanted.keys()}"
            )


Totals = dict[tuple[Any, ...], tuple[int, ...]]


def _compare(leaf: tuple[str, str], got: Totals, wanted: Totals, exact: bool) -> None:
    """Totals by key. Not exact: each is at least what is wanted."""
    assert got.keys() == wanted.keys(), (
        f"{leaf}: lost {wanted.keys() - got.keys()}, wrong {got.keys() - wanted.keys()}"
    )
    for key, totals in wanted.items():
        right = got[key] == totals if exact else all(map(operator.ge, got[key], totals))
        assert right, f"{leaf}: of {key} {totals} was expected, {got[key]} came"


def _largest(rows: Counter[Any], totals: int) -> Totals:
    """Of ⟨key…, total…⟩ the largest totals of each key."""
    found: Totals = {}
    for row in rows:
        key = row[:-totals]
        found[key] = max(found.get(key, ()), row[-totals:])
    return found


def _added(rows: Counter[Any]) -> Counter[Any]:
    """Of ⟨key, pane, count, sum⟩ one row for each key and pane."""
    found: dict[tuple[Any, ...], tuple[int, int]] = {}
    for (*key, count, total), times in rows.items():
        before = found.get(tuple(key), (0, 0))
        found[tuple(key)] = before[0] + count * times, before[1] + total * times
    return Counter((*key, *totals) for key, totals in found.items())


# ---- many cases ------------------------------------------------------------------------------------------------

CHUNK = 5
"""Cases that a process is given at a time."""
LONGEST = 60.0
"""Seconds of wall time that a case may take: hundreds of times what it needs."""
EVERY = 5.0
"""Seconds from one line of progress to the next."""


def outcome(seed: int) -> tuple[int, str]:
    """The seed, and what went wrong with its case; an empty text where nothing did."""
    try:
        run_case(seed)
    except Exception:  # a case may fail in any way, and all seeds that do are wanted
        return seed, traceback.format_exc()
    return seed, ""


def outcomes(seeds: Sequence[int]) -> list[tuple[int, str]]:
    """Called in a process of the campaign. A case that does not end is a wrong one."""
    found = []
    for seed in seeds:
        signal.setitimer(signal.ITIMER_REAL, LONGEST)
        found.append(outcome(seed))
        signal.setitimer(signal.ITIMER_REAL, 0)
    return found


def _begin_process() -> None:
    """Ctrl-C reaches all processes of a terminal: one that runs cases ends at once and in silence."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGALRM, _too_long)


def _too_long(*_: Any) -> NoReturn:
    raise TimeoutError(f"the case took more than {LONGEST:.0f} s")


class Campaign:
    """Many cases in several processes."""

    def __init__(self, seeds: range) -> None:
        self.seeds = seeds
        self.done = 0
        self.wrong: dict[int, str] = {}
        self.stopped = ""
        """Why not all cases were run."""
        self._begun = self._told = time.monotonic()

    def run(self, jobs: int) -> None:
        chunks = [self.seeds[at : at + CHUNK] for at in range(0, len(self.seeds), CHUNK)]
        fork = multiprocessing.get_context("fork")
        pool = ProcessPoolExecutor(jobs, fork, _begin_process)
        try:
            waiting = {pool.submit(outcomes, chunk) for chunk in chunks}
            while waiting and not self.stopped:
                ready, waiting = wait(waiting, 0.5, FIRST_COMPLETED)
                for future in ready:
                    for seed, error in future.result():
                        self._note(seed, error)
                self._tell()
        except BrokenProcessPool:
            self.stopped = self.stopped or "a process of the campaign died"
        finally:
            if self.stopped:
                for process in multiprocessing.active_children():
                    process.terminate()
            pool.shutdown(cancel_futures=True)

    def interrupt(self, *_: Any) -> None:
        """The handler of signals: the campaign stops within half a second."""
        self.stopped = "interrupted"

    def _note(self, seed: int, error: str) -> None:
        self.done += 1
        if error:
            self.wrong[seed] = error.splitlines()[-1]
            print(f"seed {seed} is wrong: {error}Run it again: {_AGAIN} --seed {seed}", flush=True)

    def _tell(self) -> None:
        now = time.monotonic()
        if now - self._told >= EVERY and self.done:
            self._told = now
            rate = self.done / (now - self._begun)
            left = (len(self.seeds) - self.done) / rate
            print(
                f"{self.done} of {len(self.seeds)} cases, {len(self.wrong)} wrong, {rate:.1f} cases/s,"
                f" {left // 60:.0f} min {left % 60:.0f} s left",
                flush=True,
            )

    def report(self) -> dict[str, Any]:
        bars = {"random.cases": self.done, "random.wrong": len(self.wrong)}
        return {
            "seeds": [self.seeds[0], self.seeds[-1]],
            "stopped": self.stopped,
            "seconds": round(time.monotonic() - self._begun),
            "wrong": self.wrong,
            "bars": [{"name": name, "value": value, "unit": "cases"} for name, value in bars.items()],
        }

    def summary(self) -> str:
        lines = [f"{len(self.wrong)} of {self.done} cases wrong, in {time.monotonic() - self._begun:.0f} s"]
        if self.stopped:
            lines[0] += f"; {self.stopped}, {len(self.seeds) - self.done} cases were not run"
        lines += [f"seed {seed}: {error}\n    {_AGAIN} --seed {seed}" for seed, error in self.wrong.items()]
        return "\n".join(lines)


_AGAIN = "python -m tests.consistency.random_topologies"


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 0 where all cases were run and right, 130 where they were interrupted."""
    parser = argparse.ArgumentParser(description="Run random topologies against a sequential oracle.")
    parser.add_argument("--seed", type=int, default=0, help="of the first case")
    parser.add_argument("--cases", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--json", type=Path, help="where to write a report")
    options = parser.parse_args(arguments)
    if options.cases == 1:
        print(draw_case(options.seed), flush=True)
    campaign = Campaign(range(options.seed, options.seed + options.cases))
    before = {number: signal.signal(number, campaign.interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with tempfile.TemporaryDirectory() as folder, _key_file(f"{folder}/key"):
            campaign.run(options.jobs)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if options.json:
            options.json.parent.mkdir(parents=True, exist_ok=True)
            options.json.write_text(json.dumps(campaign.report(), indent=1))
    print(campaign.summary())
    return 130 if campaign.stopped == "interrupted" else int(bool(campaign.wrong or campaign.stopped))


@contextmanager
def _key_file(name: str) -> Iterator[None]:
    """Before processes are started: they inherit it."""
    before = os.environ.get(signing.KEY_FILE)
    os.environ[signing.KEY_FILE] = name
    try:
        yield
    finally:
        if before is None:
            del os.environ[signing.KEY_FILE]
        else:
            os.environ[signing.KEY_FILE] = before


if __name__ == "__main__":  # under its own name: classes of __main__ are pickled with copies of its tables
    from tests.consistency import random_topologies

    sys.exit(random_topologies.main())
