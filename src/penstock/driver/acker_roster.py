"""Decides where the acker processes of a query run are started, and what happens when one is lost. Events in,
commands out: no IO and no clock.

When an acker is lost, its ledgers are lost too. Another process is started, on the next slot. When it listens,
every slot connects to it and confirms that it sends nothing to the old one any more. Then the spouts fail the open
roots of this acker: some of their entries went to the old process, so their ledgers could never become 0. Roots
that are emitted later have all their entries in the new process. An acker that is lost again and again becomes a
part of the driver."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from penstock.plan.model import WorkerId
from penstock.protocol.commands import Command, FailRoots, StartAcker, StopAcker, UseAcker
from penstock.protocol.events import AckerLinked, AckerStarted

_BEGIN_TIMEOUT = 20.0
"""Seconds until a process that was requested listens, and until all slots are connected to it. Both take less than
a second on an idle machine."""
_MOST_LOSSES = 4
"""Losses within ``_WINDOW`` after which the driver takes the place of an acker: whatever ends it would go on."""
_WINDOW = 60.0
_FIRST_PAUSE = 0.5
"""Seconds before the second of several processes in a row. The pause doubles with each; the first process follows
at once."""


class AckerPhase(Enum):
    """The phases of an acker. The values are what the status shows."""

    PAUSING = "lost"
    STARTING = "starting"
    LINKING = "connecting"
    RUNNING = "running"
    IN_DRIVER = "in the driver"


TRANSITIONS: Mapping[AckerPhase, Collection[AckerPhase]] = {
    AckerPhase.PAUSING: (AckerPhase.STARTING, AckerPhase.LINKING),
    AckerPhase.STARTING: (AckerPhase.LINKING, AckerPhase.PAUSING),
    AckerPhase.LINKING: (AckerPhase.RUNNING, AckerPhase.IN_DRIVER, AckerPhase.PAUSING),
    AckerPhase.RUNNING: (AckerPhase.PAUSING,),
    AckerPhase.IN_DRIVER: (),
}


class ToSlot(NamedTuple):
    """A command for a slot; None: for all slots."""

    slot: WorkerId | None
    command: Command


@dataclass
class AckerPlace:
    """One acker: the process that it has, or will have."""

    index: int
    phase: AckerPhase = AckerPhase.PAUSING
    incarnation: int = 0
    """The number of its newest process; 0 before the first."""
    slot: WorkerId | None = None
    """The slot that has started the process; None: the driver is the acker."""
    since: float = 0.0
    """When the phase began or, while it runs, when the process last reported."""
    until: float = 0.0
    """When a pause ends."""
    waiting: set[WorkerId] = field(default_factory=set)
    """The slots that are not connected to it yet."""
    losses: list[float] = field(default_factory=list)
    """When its processes were lost."""
    used: bool = False
    """Whether slots have sent anything to one of its processes. Then roots must fail after a loss."""
    process: str = "not started"
    """The newest process that has connected, for messages."""
    why: str = ""
    """Which process was lost last, and why."""

    def become(self, phase: AckerPhase, now: float) -> None:
        assert phase in TRANSITIONS[self.phase], (self.phase, phase)
        self.phase, self.since = phase, now


class AckerRoster:
    """The acker processes of one query run. Not thread-safe. All methods return the commands to send, in order."""

    def __init__(self, count: int, silence: float) -> None:
        """``silence``: seconds without a report after which a process counts as lost."""
        self.places = [AckerPlace(index) for index in range(count)]
        self.notes: list[str] = []
        """What happened, for the log and the status. The caller removes them."""
        self._silence = silence
        self._slots: list[WorkerId] = []
        """All slots, in the order in which they are given acker processes."""

    @property
    def ready(self) -> bool:
        """Whether every acker can be used by all slots."""
        done = (AckerPhase.RUNNING, AckerPhase.IN_DRIVER)
        return bool(self._slots) and all(place.phase in done for place in self.places)

    def begin(self, slots: Mapping[WorkerId, str], now: float) -> list[ToSlot]:
        """Start all ackers. ``slots``: the node of each slot. The processes are spread over the nodes."""
        self._slots = spread_over_nodes(slots)
        return [command for place in self.places for command in self._start(place, now)]

    def on_started(self, event: AckerStarted, now: float) -> list[ToSlot] | None:
        """A process has connected. Returns None if it is not the one that is awaited."""
        place = self._current(event.acker, event.incarnation)
        if place is None or place.phase is not AckerPhase.STARTING:
            return None
        place.process = f"process {event.pid} on {event.node}"
        return self._link(place, event.host, event.port, now)

    def on_linked(self, slot: WorkerId, event: AckerLinked, now: float) -> list[ToSlot]:
        """A slot uses an acker, or cannot."""
        place = self._current(event.acker, event.incarnation)
        if place is None:
            return []
        if event.error:
            return self.on_lost(event.acker, event.incarnation, f"slot {slot} cannot use it, {event.error}", now)
        place.waiting.discard(slot)
        if place.phase is not AckerPhase.LINKING or place.waiting:
            return []
        place.become(AckerPhase.IN_DRIVER if place.slot is None else AckerPhase.RUNNING, now)
        fails = place.used
        place.used = True
        if not fails:
            return []
        where = "The driver" if place.slot is None else f"{place.process.capitalize()}"
        self.notes.append(
            f"acker {place.index} was lost ({place.why}). {where} took its place, and its open tuples are emitted "
            "again"
        )
        return [ToSlot(None, FailRoots(place.index))]

    def on_report(self, acker: int, incarnation: int, now: float) -> None:
        place = self._current(acker, incarnation)
        if place is not None and place.phase is AckerPhase.RUNNING:
            place.since = now

    def on_lost(self, acker: int, incarnation: int, why: str, now: float) -> list[ToSlot]:
        """A process has ended, or cannot be used."""
        place = self._current(acker, incarnation)
        if place is None or place.phase in (AckerPhase.PAUSING, AckerPhase.IN_DRIVER):
            return []
        commands = [] if place.slot is None else [ToSlot(place.slot, StopAcker(acker, incarnation))]
        place.why = f"{place.process}: {why}"
        place.process = "not started"
        place.losses = [at for at in place.losses if at > now - _WINDOW] + [now]
        number = len(place.losses)
        place.become(AckerPhase.PAUSING, now)
        if number >= _MOST_LOSSES:
            place.incarnation += 1
            place.slot = None
            return [*commands, *self._link(place, "", 0, now)]
        if number == 1:
            return [*commands, *self._start(place, now)]
        place.until = now + _FIRST_PAUSE * (1 << (number - 2))
        return commands

    def check(self, now: float) -> list[ToSlot]:
        """Called a few times a second: ends pauses, and finds processes that hang."""
        commands = []
        for place in self.places:
            lasts, why = now - place.since, ""
            match place.phase:
                case AckerPhase.PAUSING if self._slots and now >= place.until:
                    commands += self._start(place, now)
                case AckerPhase.STARTING if lasts > _BEGIN_TIMEOUT:
                    why = f"it did not start within {_BEGIN_TIMEOUT:g} s"
                case AckerPhase.LINKING if lasts > _BEGIN_TIMEOUT:
                    why = f"not all workers connected to it within {_BEGIN_TIMEOUT:g} s"
                case AckerPhase.RUNNING if lasts > self._silence:
                    why = f"it has said nothing for {lasts:.0f} s"
            if why:
                commands += self.on_lost(place.index, place.incarnation, why, now)
        return commands

    def validate(self) -> None:
        """Check the invariants. Raises ``AssertionError``."""
        for place in self.places:
            assert place.phase is not AckerPhase.RUNNING or (place.slot is not None and not place.waiting)
            assert place.phase is not AckerPhase.IN_DRIVER or (place.slot is None and not place.waiting)
            assert place.phase is not AckerPhase.LINKING or place.waiting

    def _current(self, acker: int, incarnation: int) -> AckerPlace | None:
        place = self.places[acker] if 0 <= acker < len(self.places) else None
        return place if place is not None and place.incarnation == incarnation else None

    def _start(self, place: AckerPlace, now: float) -> list[ToSlot]:
        place.become(AckerPhase.STARTING, now)
        place.incarnation += 1
        place.slot = self._slots[(place.index + place.incarnation - 1) % len(self._slots)]
        return [ToSlot(place.slot, StartAcker(place.index, place.incarnation, len(self.places)))]

    def _link(self, place: AckerPlace, host: str, port: int, now: float) -> list[ToSlot]:
        place.become(AckerPhase.LINKING, now)
        place.waiting = set(self._slots)
        return [ToSlot(None, UseAcker(place.index, place.incarnation, host, port))]


def spread_over_nodes(slots: Mapping[WorkerId, str]) -> list[WorkerId]:
    """Order slots so that the first ones are on different nodes, as far as possible."""
    by_node: dict[str, list[WorkerId]] = defaultdict(list)
    for slot, node in sorted(slots.items()):
        by_node[node].append(slot)
    turns = [(turn, node, slot) for node, ours in by_node.items() for turn, slot in enumerate(ours)]
    return [slot for _, _, slot in sorted(turns)]
