"""A machine of the simulated cluster: cores that its executors share, and a full-duplex link to the switch.

Tuples arrive in frames, which saves events, but wait as if each arrived alone: by the queueing formula for single
tuples at the utilization of the last seconds. If frames waited for whole frames before them, waits would grow with
the size of the frame (20 times for frames of 20 tuples), and fuller machines would appear slower than they are.
"""

from __future__ import annotations

from dataclasses import dataclass

UPDATE_INTERVAL = 0.5
"""Seconds between two updates of a server's utilization: short against the 5 s over which it is averaged."""
RECENT = 0.1
"""Weight of the newest update: waits follow the utilization of about the last 5 s."""
BURST = 0.1
"""Seconds of backlog that cause no extra wait, because frames arrive in bursts that single tuples would not form.
It is more than a few frames' work and small compared with the delay between machines. Any backlog beyond it is
waited for."""
_FULLEST = 0.99
"""Highest utilization used in the formula, which diverges at 1; the backlog of a full server adds the rest."""


@dataclass(frozen=True)
class MachineSpec:
    """One of the worker machines in *Pu 2021*, table 1."""

    cores: int = 4
    memory: float = 8 * 2**30
    """Bytes."""
    bandwidth: float = 12.5e6
    """Bytes per second in each direction: 100 Mb/s."""
    delay: float = 0.0
    """Seconds that a tuple to another machine takes in addition to its time on the links: switch, transfer
    buffers."""
    handling: float = 0.0
    """Core seconds per byte for a tuple between machines, at each end: serialization, sending, receiving. Acks
    cost nothing."""


class SimServer:
    """Processes one piece of work after the other, or ``channels`` at a time. Models cores, a thread, or one
    direction of a link."""

    __slots__ = ("_seen", "_squares", "channels", "clear", "squares", "use", "wait", "work")

    def __init__(self, channels: int = 1) -> None:
        self.channels = channels
        self.work = 0.0
        """Seconds of work accepted so far, over all channels."""
        self.squares = 0.0
        """Sum of the second moments of the accepted pieces, in s²."""
        self.clear = 0.0
        """The time at which all accepted work will be done."""
        self.use: float | None = None
        """Share of the last seconds during which it was busy."""
        self.wait = 0.0
        """Mean seconds a piece waits at this utilization."""
        self._seen = self._squares = 0.0

    def accept(self, now: float, work: float, squares: float) -> float:
        """Accept pieces of work that arrive now. Returns the seconds until one of them begins."""
        self.work += work
        self.squares += squares
        clear = self.clear
        if clear < now:
            clear = now
        self.clear = clear + work / self.channels
        behind = clear - now - BURST
        return self.wait + behind if behind > 0.0 else self.wait

    def done(self, now: float) -> float:
        """Seconds of the accepted work that are done by now."""
        return self.work - max(self.clear - now, 0.0) * self.channels

    def update(self) -> None:
        """Compute the mean wait, every ``UPDATE_INTERVAL`` seconds. M/G/c: exact for one channel
        (Pollaczek-Khinchine), for several the approximation of Lee and Longton, which scales M/M/c by the mean
        residual time of the pieces."""
        work, squares = self.work - self._seen, self.squares - self._squares
        self._seen, self._squares = self.work, self.squares
        use = min(work / (UPDATE_INTERVAL * self.channels), 1.0)
        self.use = use if self.use is None else self.use + RECENT * (use - self.use)
        if work > 0.0:
            full = min(self.use, _FULLEST)
            self.wait = all_busy(self.channels, full) / (self.channels * (1 - full)) * squares / (2 * work)


def all_busy(channels: int, use: float) -> float:
    """Erlang's C formula: the probability that an arriving piece finds no channel free."""
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
        """Bytes sent and received over its link so far."""
        return (self.up.done(now) + self.down.done(now)) * self.spec.bandwidth
