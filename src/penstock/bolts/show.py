"""A bolt that shows results in the live view."""

from __future__ import annotations

from typing import Any

from penstock.topology.components import BasicBolt, Collector, Conf, Context
from penstock.topology.tuples import Tuple


class ShowBolt(BasicBolt):
    """Shows results in the live view: the newest tuple of each key, sorted by the last field in descending order.

    The key is the first field. Intended for results with a limited number of keys, because it keeps one tuple per
    key.
    """

    tick_interval = 0.25  # seconds; as often as workers report

    def __init__(self, rows: int = 10) -> None:
        self._rows = rows

    def prepare(self, conf: Conf, context: Context) -> None:
        self._publish = context.publish
        self._latest: dict[Any, Tuple] = {}

    def execute(self, tup: Tuple, collector: Collector) -> None:
        if tup.is_tick:
            self._publish(self.top())
        else:
            self._latest.pop(tup[0], None)  # a key that occurs again becomes the newest
            self._latest[tup[0]] = tup

    def cleanup(self) -> None:
        self._publish(self.top())  # includes the tuples since the last tick

    def top(self) -> list[Tuple]:
        """The rows to show."""
        rows = list(self._latest.values())
        try:
            return sorted(rows, key=lambda tup: tup[-1], reverse=True)[: self._rows]
        except TypeError:  # the values cannot be compared: show the newest first
            return rows[::-1][: self._rows]
