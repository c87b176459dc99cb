"""Shared parts of all benchmarks: machine, medians, progress, a table on the terminal and a JSON file."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

import penstock
from penstock.driver.handle import RunningTopology
from penstock.spark.java import ensure_java, java_version
from penstock.spark.session import close_session
from penstock.spark.submit import submit
from penstock.topology.builder import Topology

console = Console(stderr=True)


@dataclass
class Results:
    """Rows (all measurements) and bars (the values that are judged, by name)."""

    name: str
    rows: list[dict[str, Any]] = field(default_factory=list)
    bars: list[dict[str, Any]] = field(default_factory=list)
    curves: dict[str, list[list[float]]] = field(default_factory=dict)
    """⟨x, y⟩ of what was measured over time, by name."""
    _parts: list[tuple[str, int]] = field(default_factory=list)
    """Each part and its first row."""

    def begin(self, part: str) -> None:
        """Begin a part, whose rows have a table of their own on the terminal."""
        self._parts.append((part, len(self.rows)))

    def row(self, **values: Any) -> None:
        self.rows.append(values)

    def bar(self, name: str, value: float, unit: str) -> None:
        self.bars.append({"name": name, "value": round(value, 4), "unit": unit})

    def curve(self, name: str, x: Iterable[float], y: Iterable[float]) -> None:
        """Add a curve for a figure; only the JSON file has it."""
        self.curves[name] = [[round(float(value), 4) for value in values] for values in (x, y)]

    def finish(self, options: argparse.Namespace) -> int:
        """Print the tables and write the JSON file."""
        out = Console(width=max(120, Console().width))
        ends = [first for _, first in self._parts[1:]] + [len(self.rows)]
        for (part, first), end in zip(self._parts or [("", 0)], ends, strict=True):
            self._print(out, f"{self.name} {part}".strip(), self.rows[first:end])
        for bar in self.bars:
            out.print(f"{bar['name']} = {bar['value']:g} {bar['unit']}", highlight=False)
        if options.json:
            path = Path(options.json)
            path.parent.mkdir(parents=True, exist_ok=True)
            content = {
                "benchmark": self.name,
                "command": " ".join(["penstock", *sys.argv[1:]]),
                "machine": machine(),
                "rows": self.rows,
                "bars": self.bars,
                "curves": self.curves,
            }
            path.write_text(json.dumps(content, indent=1))
            out.print(f"written to {path}", highlight=False)
        return 0

    def _print(self, out: Console, title: str, rows: Sequence[dict[str, Any]]) -> None:
        """Print a table of the rows. Series are only in the JSON file."""
        columns = list(dict.fromkeys(key for row in rows for key, cell in row.items() if not _is_series(cell)))
        out.print(f"penstock bench {title}", highlight=False)
        table = Table(*columns)
        for row in rows:
            table.add_row(*(_cell(row.get(column, "")) for column in columns))
        out.print(table)


def run_parts(
    name: str, parts: Mapping[str, Callable[[Results, argparse.Namespace], None]], options: argparse.Namespace
) -> int:
    """Run all parts of a benchmark, or those named by ``--only``."""
    results = Results(name)
    machine()
    for part, measure in parts.items():
        if not options.only or part in options.only:
            say(f"[{part}]")
            results.begin(part)
            measure(results, options)
    close_session()
    return results.finish(options)


def machine() -> dict[str, Any]:
    """The machine and versions on which the values were measured."""
    cpu = "unknown"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            cpu = line.partition(":")[2].strip()
            break
    import pyarrow
    import pyspark

    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "memory_gb": round(psutil.virtual_memory().total / 2**30, 1),
        "system": platform.platform(),
        "python": platform.python_version(),
        "java": java_version(ensure_java()),
        "pyspark": pyspark.__version__,
        "pyarrow": pyarrow.__version__,
        "penstock": penstock.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }


def median(values: Sequence[float]) -> float:
    return float(statistics.median(values))


def say(text: str) -> None:
    """Print progress to stderr."""
    console.print(text, highlight=False)


@contextmanager
def running(topology: Topology) -> Iterator[RunningTopology]:
    """Run a topology on Spark. It is stopped without draining, because a flooded one would take long."""
    handle = submit(topology)
    try:
        yield handle
    finally:
        handle.kill(drain=False)


def rate_of(handle: RunningTopology, component: str, warm_up: float, seconds: float) -> float:
    """Tuples per second that a component executes, after a warm-up."""
    time.sleep(warm_up)
    before, begun = handle.internals.bus.totals()[component], time.monotonic()
    time.sleep(seconds)
    after, ended = handle.internals.bus.totals()[component], time.monotonic()
    return (after.executed - before.executed) / (ended - begun)


def processes(handle: RunningTopology) -> dict[str, psutil.Process]:
    """This process, its JVM and the topology's workers, by name."""
    me = psutil.Process()
    jvm = next(child for child in me.children(recursive=True) if child.name() == "java")
    found = {"driver": me, "jvm": jvm}
    found |= {
        f"worker {id}": psutil.Process(worker.hello.pid) for id, worker in sorted(handle.internals.workers.items())
    }
    return found


ProcessCpu = dict[tuple[int, float], float]
"""CPU seconds by process. A process is its id and its start, because ids are used again."""


def cpu_by_process() -> ProcessCpu:
    """CPU seconds of this process and of all it has started: on a local master, the whole topology."""
    me = psutil.Process()
    found: ProcessCpu = {}
    for process in (me, *me.children(recursive=True)):
        try:
            times = process.cpu_times()
            found[process.pid, process.create_time()] = times.user + times.system
        except psutil.NoSuchProcess:
            continue
    return found


def cpu_since(before: ProcessCpu) -> float:
    """CPU seconds used since ``before``. What a process used that has ended since is not counted."""
    return sum(seconds - before.get(process, 0.0) for process, seconds in cpu_by_process().items())


def run_json(command: Sequence[str], **kwargs: Any) -> dict[str, Any]:
    """Run a program whose last line of output is JSON."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, **kwargs)
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        raise SystemExit(f"{command[0]} failed ({done.returncode}):\n{done.stderr[-2000:]}")
    result: dict[str, Any] = json.loads(lines[-1])
    return result


def _is_series(value: Any) -> bool:
    return isinstance(value, list | dict)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
