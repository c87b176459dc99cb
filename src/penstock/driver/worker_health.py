"""What the reports of workers say of their surroundings: sinks that are away, and clocks that are wrong."""

from __future__ import annotations

from collections.abc import Collection

from penstock.plan.model import WorkerId
from penstock.protocol.driver_clock import WARN_ABOVE


class SinkOutages:
    """While any worker reports a sink that is away, no tuple may time out anywhere."""

    def __init__(self) -> None:
        self._away: set[WorkerId] = set()

    def note(self, worker: WorkerId, away: bool, workers: Collection[WorkerId]) -> list[tuple[WorkerId, bool]]:
        """A worker has reported. Returns who is to be told, and whether to hold time-outs: all workers when it
        changes, and the one that reports during an outage, because it may have moved to another process."""
        held = bool(self._away)
        (self._away.add if away else self._away.discard)(worker)
        if self._away:
            return [(each, True) for each in ([worker] if held else workers)]
        return [(each, False) for each in workers] if held else []


class SkewWarnings:
    """Warns once of each host whose clock differs from the driver's."""

    def __init__(self) -> None:
        self._warned: set[str] = set()

    def check(self, node: str, skew: float) -> str:
        """``skew``: seconds by which the node's clock is ahead. Returns the warning; empty: there is none."""
        host = node.partition("/")[0]
        if abs(skew) <= WARN_ABOVE or host in self._warned:
            return ""
        self._warned.add(host)
        return (
            f"The clock of node {host} is {abs(skew):,.1f} s {'ahead of' if skew > 0 else 'behind'} the driver's. "
            "Time-outs and latencies are corrected for it; times that your code reads are not. "
            "Synchronise the clocks of the nodes (NTP)."
        )
