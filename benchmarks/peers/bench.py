"""FastWordCount at four parallelisms: Penstock with tuples and batches, Storm with default and tuned settings,
PySpark with micro-batches.

The systems take turns within each repeat, so that a disturbance of the machine affects all of them. Ratios are
computed within a repeat; their median is reported.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.harness import Results, machine, median, rate_of, run_json, running, say
from benchmarks.words import fast_word_count
from penstock import Settings
from penstock.errors import EnvironmentFault
from penstock.spark.java import ensure_java
from penstock.spark.session import close_session

ROOT = Path(__file__).resolve().parents[2]
STORM = Path(__file__).parent / "storm"
CASES = ((1, 1, 1), (1, 2, 1), (1, 2, 2), (1, 4, 6))
SYSTEMS = ("penstock batch", "penstock tuple", "storm", "storm tuned", "pyspark micro-batch")


def main(options: argparse.Namespace) -> int:
    """``penstock bench peers``. ``--only`` takes a case such as 1/1/1 or a system."""
    only = options.only or []
    cases = [case for case in CASES if _name(case) in only] or (CASES[:1] if options.quick else CASES)
    systems = [system for system in SYSTEMS if system in only] or (SYSTEMS[:4] if options.quick else SYSTEMS)
    repeats = options.repeats or (1 if options.quick else 3)
    warm_up, seconds = (4, 4) if options.quick else (15, 10)
    if any(system.startswith("storm") for system in systems):
        build_storm()
    results = Results("peers")
    machine()
    for case in cases:
        rates: dict[str, list[float]] = {system: [] for system in systems}
        for number in range(repeats):
            for system in systems:
                rates[system].append(words_per_second(system, case, warm_up, seconds))
                say(f"  {_name(case)} repeat {number + 1}: {system} {rates[system][-1] / 1e6:.2f} M words/s")
        _report(results, case, rates)
    return results.finish(options)


def words_per_second(system: str, case: tuple[int, int, int], warm_up: int, seconds: int) -> float:
    """Words per second at the counting bolts."""
    if system.startswith("penstock"):
        try:
            topology = fast_word_count(*case, system.endswith("batch"), Settings())
            with running(topology) as handle:
                return rate_of(handle, "count", warm_up, seconds)
        finally:
            close_session()  # no JVM of Penstock may run while the next system is measured
    if system.startswith("storm"):
        return float(run_storm(case, system.endswith("tuned"), warm_up, seconds)["words_per_s"])
    command = [sys.executable, "-m", "benchmarks.peers.microbatch", str(warm_up), str(seconds)]
    return float(run_json(command, cwd=ROOT)["words_per_s"])


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
    say("building the Storm program; the first time fetches Storm 2.8.2, about 150 MB …")
    shutil.rmtree(STORM / "target", ignore_errors=True)  # otherwise libraries of an older pom would stay
    subprocess.run(["mvn", "-q", "-B", "-Dstyle.color=never", "-f", str(STORM / "pom.xml"), "package"], check=True)
    built.touch()


def run_storm(case: tuple[int, int, int], tuned: bool, warm_up: int, seconds: int, **more: Any) -> dict[str, Any]:
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


def _report(results: Results, case: tuple[int, int, int], rates: dict[str, list[float]]) -> None:
    for system, values in rates.items():
        row: dict[str, Any] = {"case": _name(case), "system": system, "words/s": round(median(values))}
        for peer in ("storm", "storm tuned"):
            if peer in rates:
                ratios = [ours / theirs for ours, theirs in zip(values, rates[peer], strict=True)]
                row[f"× {peer}"] = round(median(ratios), 2)
        row["repeats"] = " ".join(f"{value / 1e6:.2f}" for value in values)
        results.row(**row)
        if case == (1, 1, 1) and system.startswith("penstock"):
            form = system.removeprefix("penstock ")
            for peer in ("storm", "storm tuned"):
                if f"× {peer}" in row:
                    name = f"fwc.{form}.noack.vs_{peer.replace(' ', '_')}"
                    results.bar(name, row[f"× {peer}"], f"× {peer}")


def _name(case: tuple[int, int, int]) -> str:
    return "/".join(map(str, case))
