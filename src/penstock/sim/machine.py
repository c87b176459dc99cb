"""A machine of the simulated cluster: cores that its executors share, and a full-duplex link to the switch.

Tuples come to them in frames, to have fewer events, but wait as if each came for itself: by the formula for single
tuples at the use of the last seconds. Were frames to wait for whole frames before them, waits would grow with the
frame, by 20 with 20 tuples, and fuller machines would look slower than they are.
"""

from __future__ import annotations

from dataclasses import dataclass

UPDATE_INTERVAL = 0.5
"""Seconds between two updates of how much of a server is in use."""
RECENT = 0.1
"""Weight of the last update: waits follow the use of about the last 5 s."""
BURST = 0.1
"""Seconds of work that a server may be behind before it counts: frames come in bursts that their tuples would not.
More than the sum of a few frames' work, little against a hop. What a server cannot do at all waits on top."""
_FULLEST = 0.99
"""The formula has no end at 1; what a full server is behind tells the rest."""


@dataclass(frozen=True)
class MachineSpec:
    """C table 1: one of its workers."""

    cores: int = 4
    memory: float = 8 * 2**30
    """Bytes."""
    bandwidth: float = 12.5e6
    """Bytes a second in each direction: 100 Mb/s."""
    delay: float = 0.0
    """Seconds a tuple is under way to another machine besides its time on the links: switch, transfer buffers."""
    handling: float = 0.0
    """Core seconds a tuple's byte between machines costs each of them: serialising, sending, receiving. Acks cost
    none of it."""


class SimServer:
    """What does one piece of work after the other, or ``channels`` at a time: cores, a thread, one way of a
    link."""

    __slots__ = ("_seen", "_squares", "channels", "clear", "squares", "use", "wait", "work")

    def __init__(self, channels: int = 1) -> None:
        self.channels = channels
        self.work = 0.0
        """Seconds of all channels together, accepted so far."""
        self.squares = 0.0
        """Sum of the pieces' second moments, in s²."""
        self.clear = 0.0
        """When all that is accepted will be done."""
        self.use: float | None = None
        """Share of the last seconds it was busy."""
        self.wait = 0.0
        """Mean seconds until a piece's turn, at this use."""
        self._seen = self._squares = 0.0

    def accept(self, now: float, work: float, squares: float) -> float:
        """Seconds until one of the pieces that come now, together so much work, has its turn."""
        self.work += work
        self.squares += squares
        clear = self.clear
        if clear < now:
            clear = now
        self.clear = clear + work / self.channels
        behind = clear - now - BURST
        return self.wait + behind if behind > 0.0 else self.wait

    def done(self, now: float) -> float:
        """Of the work accepted."""
        return self.work - max(self.clear - now, 0.0) * self.channels

    def update(self) -> None:
        """Every ``UPDATE_INTERVAL`` seconds: the wait anew. M/G/c; exact for one channel (Pollaczek and
        Khinchine), for more Lee and Longton's: as M/M/c, by the pieces' mean residual time."""
        work, squares = self.work - self._seen, self.squares - self._squares
        self._seen, self._squares = self.work, self.squares
        use = min(work / (UPDATE_INTERVAL * self.channels), 1.0)
        self.use = use if self.use is None else self.use + RECENT * (use - self.use)
        if work > 0.0:
            full = min(self.use, _FULLEST)
            self.wait = all_busy(self.channels, full) / (self.channels * (1 - full)) * squares / (2 * work)


def all_busy(channels: int, use: float) -> float:
    """Erlang's C: how often a piece that comes finds no channel free."""
    offered = channels * use
    blocked = 1.0
    for channel in range(1, channels + 1):
        blocked = offered * blocked / (channel + offered * blocked)
    return blocked / (1 - use * (1 - blocked))


class SimMachine:
    def __init__(self, name: str, spec: MachineSpec) -> None:
        self.name, self.spec = name, spec
        self.cores = SimServer(spec.cores)
        self.up, self.down = SimServer(), SimServer()
        self.frequency = 1.0
        self.alive = True
        self.released = False

    def busy(self, now: float) -> float:
        """Core seconds of work done so far."""
        return self.cores.done(now)

    def bytes(self, now: float) -> float:
        """Over its link so far, in and out together."""
        return (self.up.done(now) + self.down.done(now)) * self.spec.bandwidth
