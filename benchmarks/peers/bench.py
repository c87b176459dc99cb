"""FastWordCount at four parallelisms: Penstock with tuples, columns and batches, Storm with default and tuned
settings, PySpark with micro-batches. The systems take turns."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

from benchmarks.harness import Results, machine, median, rate_of, run_json, running, say
from benchmarks.plain_words import plain_word_count
from benchmarks.turns import median_ratio, spread, take_turns
from benchmarks.words import fast_word_count
from penstock import Settings, Topology
from penstock.errors import EnvironmentFault
from penstock.spark.java import ensure_java
from penstock.spark.session import close_session

ROOT = Path(__file__).resolve().parents[2]
STORM = Path(__file__).parent / "storm"
Case: TypeAlias = tuple[int, int, int]
"""Tasks of the spout, of split and of count."""
PEERS = ("storm", "storm tuned")
CASES: tuple[Case, ...] = ((1, 1, 1), (1, 2, 1), (1, 2, 2), (1, 4, 6))
SYSTEMS = ("penstock batch", "penstock tuple", "penstock columns", "storm", "storm tuned", "pyspark micro-batch")
"""Tuple: bolts as users write them. Columns: the tuple form with ``emit_columns`` and ``plain_tuples``."""


def main(options: argparse.Namespace) -> int:
    """``penstock bench peers``. ``--only`` takes a case such as 1/1/1 or a system."""
    only = options.only or []
    cases = [case for case in CASES if case_name(case) in only] or (CASES[:1] if options.quick else CASES)
    systems = [system for system in SYSTEMS if system in only] or (SYSTEMS[:5] if options.quick else SYSTEMS)
    repeats = options.repeats or (1 if options.quick else 3)
    if any(system.startswith("storm") for system in systems):
        build_storm()
    results = Results("peers")
    machine()
    for case in cases:
        _report(results, case, measure_case(case, systems, repeats, options.quick))
    return results.finish(options)


def measure_case(case: Case, systems: Sequence[str], repeats: int, quick: bool) -> dict[str, list[float]]:
    """Words per second of each system, by repeat."""
    warm_up, seconds = (4, 4) if quick else (15, 10)
    return take_turns(
        f"FastWordCount {case_name(case)}",
        systems,
        repeats,
        lambda system, number: words_per_second(system, case, warm_up, seconds),
        lambda rate: f"{rate / 1e6:.2f} M words/s",
    )


def words_per_second(system: str, case: Case, warm_up: int, seconds: int) -> float:
    """Words per second at the counting bolts."""
    if system.startswith("penstock"):
        try:
            with running(_topology(system, case)) as handle:
                return rate_of(handle, "count", warm_up, seconds)
        finally:
            close_session()  # no JVM of Penstock may run while the next system is measured
    if system.startswith("storm"):
        return float(run_storm(case, system.endswith("tuned"), warm_up, seconds)["words_per_s"])
    command = [sys.executable, "-m", "benchmarks.peers.microbatch", str(warm_up), str(seconds)]
    return float(run_json(command, cwd=ROOT)["words_per_s"])


def _topology(system: str, case: Case) -> Topology:
    if system.endswith("tuple"):
        return plain_word_count(*case, Settings())
    return fast_word_count(*case, system.endswith("batch"), Settings())


def build_storm() -> None:
    """Fetch Storm and compile the Storm program, if its sources are newer than the build."""
    built = STORM / "target" / "built"
    sources = [STORM / "pom.xml", *(STORM / "src").rglob("*.*")]
    if built.exists() and all(each.stat().st_mtime < built.stat().st_mtime for each in sources):
        return
    if shutil.which("mvn") is None:
        raise EnvironmentFault(
            "penstock bench peers",
            "Maven, which builds the Storm program, is not on the PATH",
            "Install maven.",
        )
    say("building the Storm program; the first time fetches Storm 2.8.3, about 150 MB …")
    shutil.rmtree(STORM / "target", ignore_errors=True)  # otherwise libraries of an older pom would stay
    subprocess.run(["mvn", "-q", "-B", "-Dstyle.color=never", "-f", str(STORM / "pom.xml"), "package"], check=True)
    built.touch()


def run_storm(case: Case, tuned: bool, warm_up: int, seconds: int, **more: Any) -> dict[str, Any]:
    """Run Storm once. Tuned: the collector and settings that made it fastest on two cores (see its README)."""
    options: dict[str, Any] = dict(zip(("spouts", "splits", "counts"), case, strict=True))
    return _run_java(
        "FastWordCount", tuned, {"acks": "false", "warmup": warm_up, "seconds": seconds, **options, **more}
    )


def run_storm_kafka(
    bootstrap: str, topic: str, tuned: bool, warm_up: int, seconds: int, **more: Any
) -> dict[str, Any]:
    """Run Storm's word count from Kafka once, with acks. ``more`` are options of the Java program."""
    options = {"bootstrap": bootstrap, "topic": topic, "warmup": warm_up, "seconds": seconds, **more}
    return _run_java("KafkaWordCount", tuned, options)


def run_storm_rebalance(schedule: str, changes: str, out: Path, wait: int | None, **more: Any) -> dict[str, Any]:
    """Run Storm once with rebalances; the arrivals are written to ``out``. ``wait``: seconds between deactivation
    and stop; None is Storm's default, the message timeout."""
    options = {"schedule": schedule, "changes": changes, "out": out, "wait": -1 if wait is None else wait, **more}
    return _run_java("Rebalance", False, options)


def _run_java(program: str, tuned: bool, options: dict[str, Any]) -> dict[str, Any]:
    flags = ["-XX:+UseParallelGC", "-Xms2g", "-Xmx2g"] if tuned else ["-Xmx2g"]
    options = {**options, "tuned": str(tuned).lower()}
    words = [word for key, value in options.items() for word in (f"--{key}", str(value))]
    java = os.path.join(ensure_java(), "bin", "java")
    return run_json([java, *flags, "-cp", "target/classes:target/lib/*", f"peers.{program}", *words], cwd=STORM)


def add_rows(results: Results, case: Case, rates: dict[str, list[float]]) -> None:
    """Add a row for each system, with its ratios to Storm."""
    for system, values in rates.items():
        ratios = {f"× {peer}": median_ratio(values, rates[peer]) for peer in PEERS if peer in rates}
        results.row(
            case=case_name(case),
            system=system,
            **{"words/s": round(median(values))},
            **ratios,
            repeats=spread([value / 1e6 for value in values], "{:.2f}".format),
        )


def _report(results: Results, case: Case, rates: dict[str, list[float]]) -> None:
    add_rows(results, case, rates)
    for system, values in rates.items():
        if case == (1, 1, 1) and system.startswith("penstock"):
            form = system.removeprefix("penstock ")
            for peer in PEERS:
                if peer in rates:
                    name = f"fwc.{form}.noack.vs_{peer.replace(' ', '_')}"
                    results.bar(name, median_ratio(values, rates[peer]), f"× {peer}")


def case_name(case: Case) -> str:
    return "/".join(map(str, case))
