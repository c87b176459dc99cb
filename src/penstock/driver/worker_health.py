"""Evaluates what workers report about their environment: sinks whose system is unavailable, and wrong clocks."""

from __future__ import annotations

from collections.abc import Collection

from penstock.plan.model import WorkerId
from penstock.protocol.driver_clock import WARN_ABOVE


class SinkOutages:
    """Decides when time-outs are held: while any worker reports a sink whose system is unavailable, no tuple of
    the topology may time out."""

    def __init__(self) -> None:
        self._away: set[WorkerId] = set()

    def note(self, worker: WorkerId, away: bool, workers: Collection[WorkerId]) -> list[tuple[WorkerId, bool]]:
        """Record a report of ``worker``. Returns the workers to notify, and whether they are to hold time-outs:
        all workers if that has changed, and during an outage the reporting worker, because it may have moved to
        another process."""
        held = bool(self._away)
        if away:
            self._away.add(worker)
        else:
            self._away.discard(worker)
        if self._away:
            return [(each, True) for each in ([worker] if held else workers)]
        return [(each, False) for each in workers] if held else []


class SkewWarnings:
    """Warns once about each host whose clock differs from the driver's."""

    def __init__(self) -> None:
        self._warned: set[str] = set()

    def check(self, node: str, skew: float) -> str:
        """Return the warning about a node, or an empty text. ``skew``: seconds by which its clock is ahead."""
        host = node.partition("/")[0]
        if abs(skew) <= WARN_ABOVE or host in self._warned:
            return ""
        self._warned.add(host)
        return (
            f"The clock of node {host} is {abs(skew):,.1f} s {'ahead of' if skew > 0 else 'behind'} the driver's. "
            "Time-outs and latencies are corrected for it; times that your code reads are not. "
            "Synchronise the clocks of the nodes (NTP)."
        )
