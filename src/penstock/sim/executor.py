"""Components and their executors in the simulated cluster."""

from __future__ import annotations

import random
from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import pyarrow as pa

from penstock.sim.machine import SimServer
from penstock.topology.groupings import Fields, Grouping, Shuffle, Targets

if TYPE_CHECKING:
    from penstock.sim.machine import SimMachine

ACKER = "acker"
KEY = "key"


@dataclass(frozen=True)
class SimComponent:
    """A component."""

    name: str
    executors: int
    service: float
    """Core seconds a tuple takes, on average, at full frequency."""
    source: str | None = None
    """The component it takes from; None: a spout."""
    size: float = 100.0
    """Bytes of a tuple it emits."""
    emits: int = 0
    """Tuples for each it takes."""
    frames: int = 1
    """In how many frames what it emits for one frame goes, each to a target of its own."""
    grouping: Grouping = Shuffle()  # noqa: RUF009
    """Of what it takes: shuffle, or fields over ``KEY``."""
    memory: float = 0.0
    """Bytes an executor has in use."""
    state: float = 0.0
    """Bytes that are copied when an executor moves."""
    rate: float | None = None
    """Tuples a second that come to each executor of a spout, a frame at a time, Poisson; None: always enough."""


@dataclass(slots=True, eq=False)
class Root:
    """One frame of a spout with all that stems from it."""

    spout: SimExecutor
    emitted: float
    left: int = 1
    """Frames of it that are not processed; 0: its ack is under way."""
    processed: int = 0
    """Tuples of it that bolts processed."""
    last: float = 0.0
    """When the last of them was."""
    over: bool = False
    """Completed, or given up: what still comes of it changes nothing."""


Frame = tuple[Root, int, float]
"""⟨root, tuples, core seconds for each to be read⟩"""


class SimExecutor:
    """A thread: one tuple at a time, in order. What waits for it has no end: the spouts' pending tuples are
    bounded."""

    __slots__ = (
        "begun",
        "component",
        "id",
        "index",
        "is_acker",
        "is_spout",
        "machine",
        "paused",
        "pending",
        "queue",
        "routers",
        "sent",
        "thread",
        "traffic",
        "until",
        "waiting",
    )

    def __init__(self, id: str, index: int, component: SimComponent, machine: SimMachine) -> None:
        self.id, self.index, self.component, self.machine = id, index, component, machine
        self.is_acker = component.name == ACKER
        self.is_spout = component.source is None and not self.is_acker
        self.thread = SimServer()
        self.until = 0.0
        """When it is done with all it was given."""
        self.paused = False
        """Between two machines, or its machine is dead."""
        self.queue: list[Frame] = []
        """What came in that time."""
        self.begun = 0.0
        """Its thread's work before this window."""
        self.sent: dict[int, int] = {}
        """Tuples to each executor, by index, in this window."""
        self.traffic = 0.0
        """Bytes from and to other machines in this window."""
        self.routers: list[Choice] = []
        """One for each component that takes from it."""
        self.pending = 0
        """A spout's tuples that are neither acked nor given up."""
        self.waiting = 0
        """Frames that came to a spout with a rate, or were given up, and are still to be emitted."""


class Choice:
    """Which executor of a component gets the next frame of one source: production's router, asked for frames.

    Shuffle: its turns. Fields: the router says which of ``KEYS`` words belong to which executor, and a frame goes
    to one drawn by the weights of its words, Zipf's. So an executor with a frequent word has more to do.
    """

    def __init__(
        self, grouping: Grouping, targets: Sequence[SimExecutor], source: int, chance: random.Random
    ) -> None:
        self.targets, self._chance = targets, chance
        self._router = grouping.router(Targets(tuple(range(len(targets))), source_task=source))
        self._edges: list[float] = weights(grouping, len(targets)) if isinstance(grouping, Fields) else []
        self._turns: list[SimExecutor] = []
        self._rows = pa.record_batch({"frame": [0] * len(targets)})
        """For a router that only counts: a row stands for a frame."""

    def next(self) -> SimExecutor:
        if self._edges:
            return self.targets[bisect(self._edges, self._chance.random() * self._edges[-1])]
        if not self._turns:
            count = len(self.targets)
            chosen = [0] * count
            for target, rows in self._router.split(self._rows):
                for row in range(count)[rows] if isinstance(rows, slice) else rows.tolist():
                    chosen[row] = target
            self._turns = [self.targets[target] for target in reversed(chosen)]
        return self._turns.pop()


KEYS = 10_000
"""Words of a vocabulary."""
SKEW = 0.5
"""Zipf's exponent. Ours: with 1, as in a book, one of a hundred counting executors gets a tenth of all words, and
C's figure of 50 to 70 % of all machines in use would be out of reach."""
_known: dict[tuple[str, int], list[float]] = {}


def weights(grouping: Fields, targets: int) -> list[float]:
    """Of the targets, added up: by production's hash of the words, each with its frequency."""
    known = (str(grouping), targets)
    if known not in _known:
        words = pa.record_batch({KEY: [f"word{number}" for number in range(KEYS)]})
        shares = [0.0] * targets
        for target, rows in grouping.router(Targets(tuple(range(targets)))).split(words):
            chosen = range(KEYS)[rows] if isinstance(rows, slice) else rows.tolist()
            shares[target] = sum((rank + 1) ** -SKEW for rank in chosen)
        _known[known] = list(accumulate(shares))
    return _known[known]
