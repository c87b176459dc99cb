"""What every benchmark shares: the machine, medians, progress, a table on the terminal and JSON in a file."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
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
    """Rows (what was measured) and bars (what is judged, by the names of the issues)."""

    name: str
    rows: list[dict[str, Any]] = field(default_factory=list)
    bars: list[dict[str, Any]] = field(default_factory=list)

    def row(self, **values: Any) -> None:
        self.rows.append(values)

    def bar(self, name: str, value: float, unit: str) -> None:
        self.bars.append({"name": name, "value": round(value, 4), "unit": unit})

    def finish(self, options: argparse.Namespace) -> int:
        """Print the table, write the JSON."""
        out = Console(width=max(120, Console().width))
        columns = list(dict.fromkeys(key for row in self.rows for key in row))
        table = Table(*columns, title=f"penstock bench {self.name}", title_justify="left")
        for row in self.rows:
            table.add_row(*(_cell(row.get(column, "")) for column in columns))
        out.print(table)
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
            }
            path.write_text(json.dumps(content, indent=1))
            out.print(f"written to {path}", highlight=False)
        return 0


def run_parts(
    name: str, parts: Mapping[str, Callable[[Results, argparse.Namespace], None]], options: argparse.Namespace
) -> int:
    """A benchmark in parts: all of them, or those that ``--only`` names."""
    results = Results(name)
    machine()
    for part, measure in parts.items():
        if not options.only or part in options.only:
            say(f"[{part}]")
            measure(results, options)
    close_session()
    return results.finish(options)


def machine() -> dict[str, Any]:
    """Where the figures come from."""
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
    """Progress, on stderr."""
    console.print(text, highlight=False)


@contextmanager
def running(topology: Topology) -> Iterator[RunningTopology]:
    """A topology on Spark, without waiting for a flooded one to drain at the end."""
    handle = submit(topology)
    try:
        yield handle
    finally:
        handle.kill(drain=False)


def rate_of(handle: RunningTopology, component: str, warm_up: float, seconds: float) -> float:
    """Tuples a second a component executes, after a warm-up."""
    time.sleep(warm_up)
    before, begun = handle.internals.bus.totals()[component], time.monotonic()
    time.sleep(seconds)
    after, ended = handle.internals.bus.totals()[component], time.monotonic()
    return (after.executed - before.executed) / (ended - begun)


def processes(handle: RunningTopology) -> dict[str, psutil.Process]:
    """This process, the JVM below it and the topology's workers, by a name to print."""
    me = psutil.Process()
    jvm = next(child for child in me.children(recursive=True) if child.name() == "java")
    found = {"driver": me, "jvm": jvm}
    found |= {
        f"worker {id}": psutil.Process(worker.hello.pid) for id, worker in sorted(handle.internals.workers.items())
    }
    return found


def cpu_seconds(chosen: dict[str, psutil.Process]) -> float:
    total = 0.0
    for process in chosen.values():
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system
    return total


def run_json(command: Sequence[str], **kwargs: Any) -> dict[str, Any]:
    """Run a program that prints one line of JSON last."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, **kwargs)
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        raise SystemExit(f"{command[0]} failed ({done.returncode}):\n{done.stderr[-2000:]}")
    result: dict[str, Any] = json.loads(lines[-1])
    return result


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
