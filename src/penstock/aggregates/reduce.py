"""``Reduce``: one description of an aggregate by key, for the bolt that makes partials and the bolt that merges
them.

>>> counts = Reduce("word", count=Count())
>>> builder.set_bolt("count", counts.partials(), 3).fields_grouping("split", "word")
>>> builder.set_bolt("total", counts.merged()).fields_grouping("count", "word")
"""

from __future__ import annotations

from typing import Any

from penstock.aggregates.bolts import MergeBolt, PartialBolt, WindowBolt
from penstock.aggregates.keyed import KeyedAggregate, MergedFields
from penstock.aggregates.merges import Merge
from penstock.aggregates.windows import Window
from penstock.errors import TopologyError

__all__ = ["MergeBolt", "PartialBolt", "Reduce", "Window", "WindowBolt"]


class Reduce:
    """Describes what to compute from the tuples of each key:
    ``Reduce("shop", "product", revenue=Sum("price"), sold=Count())``.

    The key is any number of fields; without one, all tuples have the same key. The name of each merge is the name
    of the field of its result. A ``Reduce`` does nothing itself; ``partials`` and ``merged`` create the bolts.
    """

    def __init__(self, *key: str, **merges: Merge[Any, Any]) -> None:
        self._key, self._merges = key, merges
        self._window: Window | None = None
        if not merges:
            raise TopologyError(repr(self), "it has no merge", "Name one: count=Count().")
        for name, merge in merges.items():
            if not isinstance(merge, Merge):
                raise TopologyError(
                    repr(self),
                    f"{name} is the class {merge.__name__}, not a Merge"
                    if isinstance(merge, type)
                    else f"{name} is {merge!r}, not a Merge",
                    f"Pass {merge.__name__}(), with brackets."
                    if isinstance(merge, type)
                    else "Use one of Penstock's merges, such as Count(), or derive your own from Merge.",
                )

    def __repr__(self) -> str:
        return f"Reduce({', '.join([*map(repr, self._key), *(f'{name}=…' for name in self._merges)])})"

    def window(
        self, time: str, length: float, slide: float | None = None, lateness: float | None = None
    ) -> Reduce:
        """The same aggregate over a sliding window, with a result for each key and window. Windows have the given
        ``length``; a new one begins every ``slide`` (by default, when the previous one ends). All arguments have
        the unit of the field ``time``, which contains the time of the event. Results therefore do not depend on
        how fast tuples are processed.

        Tuples up to ``lateness`` behind the newest one are counted (by default, one slide). ``lateness`` must
        cover the time difference between tasks, including migration: later partials are emitted on the stream
        ``late`` of ``merged()``.
        """
        slide = length if slide is None else slide
        reduce = Reduce(*self._key, **self._merges)
        reduce._window = Window(time, length, slide, slide if lateness is None else lateness)
        return reduce

    def partials(self) -> PartialBolt:
        """The bolt that makes partials. Its input may have any grouping."""
        return PartialBolt(self._key, self._merges, self._window)

    def by_owner(self) -> KeyedAggregate:
        """The same aggregate with a state in the tasks that own the keys: ``keyed()`` of the result instead of
        ``partials()``, and ``merged()`` of the result. Needs a key, and no window."""
        if self._window is not None or not self._key:
            problem = "it has a window" if self._window is not None else "it has no key"
            raise TopologyError(
                repr(self), f"{problem}, so no task can own its keys", "Use partials() and merged()."
            )
        return MergedFields(self._key, self._merges)

    def merged(self) -> MergeBolt | WindowBolt:
        """The bolt that merges the partials. Group its input by fields of the key, or globally."""
        if self._window is not None:
            return WindowBolt(self._key, self._merges, self._window)
        return MergeBolt(self._key, self._merges)
