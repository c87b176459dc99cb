"""Detects whether tuples are in flight between the workers of a query run."""

from __future__ import annotations

from penstock.driver.registry import WorkerRegistry


class Drain:
    """Requests reports from all workers, round after round, until two successive rounds show the same number of
    frames sent and all of them processed. Useful only after the spouts were deactivated. Called by one thread."""

    def __init__(self, registry: WorkerRegistry) -> None:
        self._registry = registry
        self._round: int | None = None
        self._before: tuple[int, int] | None = None

    def done(self) -> bool:
        """Return whether nothing is in flight. Called whenever a worker reports something. Always False if a
        worker has failed or is lost."""
        registry = self._registry
        if self._round is None:
            self._round = registry.probe()
        while not registry.broken and registry.answered(self._round):
            counts = registry.in_flight(self._round)
            if counts is not None and counts == self._before:
                return True
            self._before, self._round = counts, registry.probe()
        return False
