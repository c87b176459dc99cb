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
    """A component of the simulated topology."""

    name: str
    executors: int
    service: float
    """Mean core seconds per tuple at full frequency."""
    source: str | None = None
    """The component whose tuples it receives; None for a spout."""
    size: float = 100.0
    """Bytes of an emitted tuple."""
    emits: int = 0
    """Tuples emitted per received tuple."""
    frames: int = 1
    """Number of frames in which the tuples emitted for one frame are sent, each to its own target."""
    grouping: Grouping = Shuffle()  # noqa: RUF009
    """Grouping of its input: shuffle, or fields over ``KEY``."""
    pairs: bool = False
    """Each executor receives from one executor only, drawn at random, so that there are as few streams as
    executors. The grouping then divides a sender's tuples among the few that receive from it."""
    memory: float = 0.0
    """Bytes in use by an executor."""
    state: float = 0.0
    """Bytes copied when an executor moves."""
    rate: float | None = None
    """Tuples per second that arrive at each executor of a spout, one frame at a time, as a Poisson process. None:
    the spout always has tuples to emit."""


@dataclass(slots=True, eq=False)
class Root:
    """One frame emitted by a spout, with all frames that stem from it."""

    spout: SimExecutor
    emitted: float
    left: int = 1
    """Frames of it that are not processed yet; 0: its ack is on its way."""
    processed: int = 0
    """Tuples of it that bolts have processed."""
    last: float = 0.0
    """Time at which the last of them was processed."""
    over: bool = False
    """Completed or given up: further events of this root have no effect."""


Frame = tuple[Root, int, float]
"""⟨root, tuples, core seconds to deserialize each tuple⟩"""


class SimExecutor:
    """A thread that processes one tuple at a time, in order. Its queue is unbounded, because the pending tuples of
    the spouts are bounded."""

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
        """The time at which all accepted work is done."""
        self.paused = False
        """The executor is between two machines, or its machine is dead."""
        self.queue: list[Frame] = []
        """Frames that arrived while it was paused."""
        self.begun = 0.0
        """Work of its thread before the current load sample."""
        self.sent: dict[int, int] = {}
        """Tuples sent in the current load sample, by index of the receiving executor."""
        self.traffic = 0.0
        """Bytes exchanged with other machines in the current load sample."""
        self.routers: list[Choice] = []
        """One per component that receives its tuples."""
        self.pending = 0
        """Tuples of a spout that are neither acked nor given up."""
        self.waiting = 0
        """Frames of a spout with a rate that have arrived or were given up, and are not emitted yet."""


class Choice:
    """Chooses the executor that receives the next frame from one source, with the production router.

    Shuffle: the router's turns. Fields: the router assigns ``KEYS`` words to executors, and the target of a frame
    is drawn by the weights of its words, which follow Zipf's law. So an executor with a frequent word has more to
    do.
    """

    def __init__(
        self, grouping: Grouping, targets: Sequence[SimExecutor], source: int, chance: random.Random
    ) -> None:
        self.targets, self._chance = targets, chance
        self._router = grouping.router(Targets(tuple(range(len(targets))), source_task=source))
        self._edges: list[float] = weights(grouping, len(targets)) if isinstance(grouping, Fields) else []
        self._turns: list[SimExecutor] = []
        self._rows = pa.record_batch({"frame": [0] * len(targets)})
        """Input for a router that only counts rows; each row represents a frame."""

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
"""Words in the vocabulary."""
SKEW = 0.5
"""Exponent of Zipf's law. With 1, as in a book, one of a hundred counting executors would receive a tenth of all
words, and the 50 to 70 % use of all machines in *Pu 2021*, figure 8, could not be reached."""
_known: dict[tuple[str, int], list[float]] = {}


def weights(grouping: Fields, targets: int) -> list[float]:
    """Cumulative weights of the targets: each word's frequency, by the production hash of the words."""
    known = (str(grouping), targets)
    if known not in _known:
        words = pa.record_batch({KEY: [f"word{number}" for number in range(KEYS)]})
        shares = [0.0] * targets
        for target, rows in grouping.router(Targets(tuple(range(targets)))).split(words):
            chosen = range(KEYS)[rows] if isinstance(rows, slice) else rows.tolist()
            shares[target] = sum((rank + 1) ** -SKEW for rank in chosen)
        _known[known] = list(accumulate(shares))
    return _known[known]
