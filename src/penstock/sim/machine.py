"""A machine of the simulated cluster: cores that its executors share, and a full-duplex link to the switch."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.sim.executor import Executor


@dataclass(frozen=True)
class MachineSpec:
    """C table 1: one of its workers."""

    cores: int = 4
    memory: float = 8 * 2**30
    """Bytes."""
    bandwidth: float = 12.5e6
    """Bytes a second in each direction: 100 Mb/s."""
    delay: float = 0.0
    """Seconds a frame is under way to another machine besides its time on the links: switch, transfer buffers."""


class Port:
    """One direction of a link: frames one after the other, the last one accepted is through at ``free_at``."""

    __slots__ = ("bandwidth", "bytes", "free_at")

    def __init__(self, bandwidth: float) -> None:
        self.bandwidth = bandwidth
        self.free_at = 0.0
        self.bytes = 0.0
        """Accepted so far."""

    def accept(self, now: float, size: float, since: float) -> float:
        """When the frame is through. ``since``: when its first byte could be taken; before now for a receiver,
        which takes what the sender's link lets through while it comes."""
        begin = max(since, self.free_at)
        self.free_at = max(begin + size / self.bandwidth, now)
        self.bytes += size
        return self.free_at


@dataclass(eq=False)
class Machine:
    """Executors with work stand in line for a core; a core works on one frame of the first and then puts it at the
    end: threads that take turns, a frame at a time. So executors share cores evenly, as long as their frames take
    equally long, and an executor is never on two cores."""

    name: str
    spec: MachineSpec
    line: deque[Executor] = field(default_factory=deque)
    frequency: float = 1.0
    alive: bool = True
    released: bool = False
    busy: float = 0.0
    """Core seconds so far."""

    def __post_init__(self) -> None:
        self.idle = self.spec.cores
        self.up, self.down = Port(self.spec.bandwidth), Port(self.spec.bandwidth)

    @property
    def bytes(self) -> float:
        """Over its link so far, in and out together."""
        return self.up.bytes + self.down.bytes
