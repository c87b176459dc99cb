"""Ready-made bolts."""

from __future__ import annotations

from typing import Any

from penstock.topology.components import BasicBolt, Collector, Conf, Context
from penstock.topology.tuples import Tuple


class ShowBolt(BasicBolt):
    """Shows results in the live view: the newest tuple of each key, those with the largest last field first.

    The key is the first field. Meant for results, not for floods: it keeps one tuple per key.
    """

    def __init__(self, rows: int = 10) -> None:
        self._rows = rows

    def prepare(self, conf: Conf, context: Context) -> None:
        self._publish = context.publish
        self._latest: dict[Any, Tuple] = {}
        self._shown = 0

    def execute(self, tup: Tuple, collector: Collector) -> None:
        if not tup.is_tick:
            self._latest[tup[0]] = tup
