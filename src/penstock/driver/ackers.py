"""The ackers of one query run, as the driver sees them: the ledgers of its own, and the acker processes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from penstock.acking import ledger
from penstock.acking.ledger import Acker
from penstock.driver.acker_roster import AckerPhase, AckerRoster, ToSlot
from penstock.plan.model import WorkerId
from penstock.protocol.commands import Command, RootsSettled
from penstock.protocol.events import AckerLinked, AckerReport, AckerStarted, AckTally, RootsFailed

log = logging.getLogger("penstock.driver")

_RATE_SPAN = 1.0
"""Least seconds over which a rate is measured."""


@dataclass(frozen=True)
class AckerStatus:
    """Status of one acker."""

    acker: int
    node: str
    """Empty while it has no process. ``driver``: it is a part of the driver."""
    pid: int | None
    """None while it has no process, and if it is a part of the driver."""
    state: str
    """``running``, ``starting``, ``connecting``, ``lost`` or ``in the driver``."""
    open_roots: int
    entries: int
    """Changes of ledgers so far."""
    rate: float
    """Changes of ledgers per second."""
    cpu: float | None
    """CPU seconds of the process so far. None if it is a part of the driver."""
    cores: float | None
    """CPU seconds per second."""
    rss: int | None
    """Resident memory in bytes."""


class AckerMeter:
    """Computes rates from counters that only grow."""

    def __init__(self, now: float) -> None:
        self._at, self._entries, self._cpu = now, 0, 0.0
        self.rate = self.cores = 0.0

    def note(self, entries: int, cpu: float, now: float) -> None:
        span = now - self._at
        if span >= _RATE_SPAN:
            self.rate, self.cores = (entries - self._entries) / span, (cpu - self._cpu) / span
            self._at, self._entries, self._cpu = now, entries, cpu


@dataclass
class AckerConnection:
    """One acker process that has connected."""

    started: AckerStarted
    close: Callable[[], None]
    meter: AckerMeter
    report: AckerReport = field(default_factory=lambda: AckerReport(0, 0, 0.0, 0))


class Ackers:
    """All ackers of a query run. Any thread may read ``ready`` and call ``status``. The other methods are called
    on the coordinator's loop."""

    def __init__(
        self,
        key: int,
        count: int,
        silence: float,
        send: Callable[[WorkerId | None, Command], None],
        note: Callable[[str], None],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """``key``: the key of the ledgers. ``count``: 0 if acks are not tracked; with 1 the driver is the acker.
        ``silence``: seconds after which a process that says nothing counts as lost. ``send`` sends a command to a
        slot, or to all; ``note`` records a text for users."""
        self.count = count
        self._own, self._meter = Acker(key), AckerMeter(monotonic())
        self._roster = AckerRoster(count if count > 1 else 0, silence)
        self._send, self._note, self._now = send, note, monotonic
        self._connections: dict[int, AckerConnection] = {}

    @property
    def has_processes(self) -> bool:
        return self.count > 1

    @property
    def ready(self) -> bool:
        """Whether all workers can use all ackers."""
        return not self.has_processes or self._roster.ready

    # ---- the driver's own ledgers ----------------------------------------------------------------------

    def settle(self, event: AckTally | RootsFailed) -> list[RootsSettled]:
        """Enter acks or failures. Returns what to tell the spouts."""
        if isinstance(event, AckTally):
            settled, component, error = self._own.apply(*ledger.unpack(event.data)), "", ""
        else:
            first, length = np.array(event.first, np.uint64), np.array(event.length, np.int64)
            settled, component, error = self._own.close(first, length), event.component, event.error
        return [
            RootsSettled(task, component, error, np.concatenate(ledger.ranges(numbers)).tobytes())
            for task, numbers in settled.items()
        ]

    def settled_below(self, numbers: Mapping[int, int]) -> None:
        """Record for each spout task that all its roots with smaller numbers are settled."""
        for task, number in numbers.items():
            self._own.settled_below(task, number)
        self._meter.note(self._own.entries, 0.0, self._now())

    # ---- acker processes -------------------------------------------------------------------------------

    def begin(self, slots: Mapping[WorkerId, str]) -> None:
        """Have the processes started. ``slots``: the node of each slot that has connected."""
        if self.has_processes:
            self._carry_out(self._roster.begin(slots, self._now()))

    def connect(self, started: AckerStarted, close: Callable[[], None]) -> bool:
        """A process has connected. Returns False if it is not awaited any more."""
        commands = self._roster.on_started(started, self._now())
        if commands is None:
            return False
        self._connections[started.acker] = AckerConnection(started, close, AckerMeter(self._now()))
        self._carry_out(commands)
        return True

    def report(self, started: AckerStarted, report: AckerReport) -> None:
        self._roster.on_report(started.acker, started.incarnation, self._now())
        connection = self._connections.get(started.acker)
        if connection is not None and connection.started == started:
            connection.report = report
            connection.meter.note(report.entries, report.cpu, self._now())

    def lost(self, started: AckerStarted) -> None:
        """The connection of a process has ended."""
        self._carry_out(self._roster.on_lost(started.acker, started.incarnation, "it has ended", self._now()))

    def linked(self, slot: WorkerId, event: AckerLinked) -> None:
        self._carry_out(self._roster.on_linked(slot, event, self._now()))

    def check(self) -> None:
        """Look for processes that hang. Called a few times a second."""
        self._carry_out(self._roster.check(self._now()))

    def close(self) -> None:
        """End all processes, by closing their connections."""
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()

    def status(self) -> list[AckerStatus]:
        own = self._own
        if not self.has_processes:
            meter, state = self._meter, AckerPhase.IN_DRIVER.value
            here = AckerStatus(0, "driver", None, state, own.open_roots, own.entries, meter.rate, None, None, None)
            return [here] if self.count else []
        return [self._status_of(place.index) for place in self._roster.places]

    def _status_of(self, acker: int) -> AckerStatus:
        phase, each = self._roster.places[acker].phase, self._connections.get(acker)
        if phase is AckerPhase.IN_DRIVER:
            return AckerStatus(acker, "driver", None, phase.value, self._own.open_roots, 0, 0.0, None, None, None)
        if each is None or phase in (AckerPhase.PAUSING, AckerPhase.STARTING):
            return AckerStatus(acker, "", None, phase.value, 0, 0, 0.0, None, None, None)
        report, meter, started = each.report, each.meter, each.started
        return AckerStatus(
            acker,
            started.node,
            started.pid,
            phase.value,
            report.open_roots,
            report.entries,
            meter.rate,
            report.cpu,
            meter.cores,
            report.rss,
        )

    def _carry_out(self, commands: list[ToSlot]) -> None:
        for place in self._roster.places:
            each = self._connections.get(place.index)
            if each is not None and each.started.incarnation != place.incarnation:
                del self._connections[place.index]
                each.close()
        for slot, command in commands:
            self._send(slot, command)
        for text in self._roster.notes:
            log.warning("%s", text)
            self._note(text)
        self._roster.notes.clear()
