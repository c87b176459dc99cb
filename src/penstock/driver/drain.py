"""Whether anything is in flight between the workers of a query run."""

from __future__ import annotations

from penstock.driver.registry import WorkerRegistry


class Drain:
    """Asks all workers for reports until two rounds in a row say that every frame that was sent is done. Of use
    once the spouts are inactive. ``done`` is called whenever a worker reports something, by one thread."""

    def __init__(self, registry: WorkerRegistry) -> None:
        self._registry = registry
        self._round: int | None = None
        self._before: tuple[int, int] | None = None

    def done(self) -> bool:
        registry = self._registry
        if self._round is None:
            self._round = registry.probe()
        while not registry.broken and registry.answered(self._round):
            counts = registry.in_flight(self._round)
            if counts is not None and counts == self._before:
                return True
            self._before, self._round = counts, registry.probe()
        return False
