"""Rates, queue lengths and latencies of a running topology's components over time, and their figures."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.driver.handle import RunningTopology
from penstock.metrics.stats import TaskStats

_STEP = 0.5  # seconds between two points


class Series:
    """Samples a topology on its own thread, inside its ``with`` block."""

    def __init__(self, handle: RunningTopology) -> None:
        self.points: list[dict[str, Any]] = []
        """One per component and time: seconds, component, rate, queued, limit; p50 and p99 since the last
        point."""
        self._handle = handle
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="series", daemon=True)

    def __enter__(self) -> Series:
        self._begun = time.monotonic()
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._ended.set()
        self._thread.join()

    def mean_rate(self, component: str, begin: float, end: float) -> float:
        """Tuples per second that a component executed between two times."""
        rates = [p["rate"] for p in self.points if p["component"] == component and begin <= p["seconds"] < end]
        return sum(rates) / len(rates) if rates else 0.0

    def _run(self) -> None:
        before, at = self._handle.internals.bus.totals(), time.monotonic()
        while not self._ended.wait(_STEP):
            after, now = self._handle.internals.bus.totals(), time.monotonic()
            for component, stats in after.items():
                self.points.append(self._point(component, before[component], stats, now - at, now))
            before, at = after, now

    def _point(self, component: str, then: TaskStats, now: TaskStats, span: float, at: float) -> dict[str, Any]:
        recent = now.latency.minus(then.latency)
        return {
            "seconds": round(at - self._begun, 2),
            "component": component,
            "rate": (now.executed - then.executed) / span,
            "queued": now.queued,
            "limit": now.limit if now.limit != float("inf") else None,
            "p50": recent.percentile(0.5),
            "p99": recent.percentile(0.99),
        }


def plot(path: Path, title: str, runs: Mapping[str, Sequence[dict[str, Any]]], components: Sequence[str]) -> None:
    """Draw rate, queue length and p99 over time, one column per run."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(3, len(runs), figsize=(4 * len(runs), 7), sharex=True, sharey="row", squeeze=False)
    for column, (run, points) in enumerate(runs.items()):
        for component in components:
            mine = [point for point in points if point["component"] == component]
            seconds = [point["seconds"] for point in mine]
            axes[0][column].plot(seconds, [point["rate"] for point in mine], label=component)
            axes[1][column].plot(seconds, [point["queued"] for point in mine], label=component)
            axes[2][column].plot(seconds, [(point["p99"] or 0) * 1000 for point in mine], label=component)
        axes[0][column].set_title(run)
        axes[2][column].set_xlabel("s")
    for row, label in enumerate(("tuples/s", "tuples waiting", "p99 ms")):
        axes[row][0].set_ylabel(label)
        for each in axes[row]:
            each.grid(alpha=0.3)
    axes[0][0].legend()
    figure.suptitle(title)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=90)
    plt.close(figure)
