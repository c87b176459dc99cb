"""One slot moves to another node while the topology runs (SPEC 6.5), into a seat that is kept free there.

In steps; up to the third it can be given up, and the old seat goes on as if nothing had been:

1. A free seat on the node prepares to take the slot over, and reads ahead what the slot has committed
   (``seated``).
2. The slots that send to it send everything to both seats from now on (``doubled``). The old one goes on producing
   the results; the new one emits nothing, and keeps what comes.
3. The end of an epoch is announced, and its markers come from every sender: the cut of each. The old one does all
   that came before them, stores its state with a commit (``stored``), and then nothing more.
4. The slot is mapped to the new seat, which is told and asked from now on, and its old tasks are closed
   (``mapped``); the new ones take up the state, drop the copies of what came before the markers and do what came
   behind them (``merged``).
5. The senders send to the new one only (``switched``). The old seat is free as soon as nothing more can come
   there.

Every tuple is so applied by exactly one of the two. Whatever dies after step 3, the topology is started again from
a committed epoch, as after any other loss. At most once there is nothing to start from; a commit is made for the
move alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from penstock.coordinator.crew import Connection
from penstock.coordinator.messages import Close, Leave, Open, ReadAhead, SendTo, Stay
from penstock.errors import PenstockError, StateError, TopologyFailed
from penstock.faults import CrashPoint
from penstock.plan.model import SlotId
from penstock.spark.start import LOOK, Lost, Start

log = logging.getLogger("penstock.supervisor")


@dataclass(frozen=True)
class Moved:
    """A slot that is on another node."""

    time: float
    """When, on the monotonic clock."""
    slot: SlotId
    source: str
    target: str
    """Nodes."""
    gap: float
    """Seconds in which nobody did the slot's work."""
    seconds: float
    """From the wish to the end of the gap."""
    steps: Mapping[str, float] = field(default_factory=dict)
    """When each step was done, in seconds since the wish."""

    def to_json(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "slot": str(self.slot)}

    def __str__(self) -> str:
        way = f"slot {self.slot} from {self.source} to {self.target}"
        return f"{way}; {self.gap * 1000:.0f} ms without it, after {self.seconds:.1f} s of preparation"


@dataclass(frozen=True)
class MoveWish:
    """Slots that are to be on other nodes, one after the other."""

    nodes: Mapping[SlotId, str]
    reason: str
    start: int
    """The number of the one they are slots of."""
    by_policy: bool = False
    answer: Future[list[Moved]] = field(default_factory=Future)
    kind = "move"

    def fits(self, start: Start) -> bool:
        return self.start == start.number


def movable(start: Start, nodes: Mapping[SlotId, str]) -> dict[SlotId, str]:
    """Those slots that are not where they are wanted, and can move there alone: slots of bolts, as many as find a
    free seat."""
    free = Counter((seat.stage, each.hello.node) for seat, each in start.crew.seats.items() if each.free)
    found = {}
    for slot, node in sorted(nodes.items()):
        now = start.crew.slots.get(slot)
        if slot.stage and now is not None and now.hello.node != node and free[slot.stage, node]:
            free[slot.stage, node] -= 1
            found[slot] = node
    return found


class Mover:
    """Carries out moves, one after the other."""

    def __init__(self, go_on: Callable[[], None]) -> None:
        """``go_on`` is asked while waiting, and raises where there is no point in it any longer."""
        self.done: list[Moved] = []
        """Oldest first."""
        self._go_on = go_on

    def move(self, wish: MoveWish, start: Start) -> list[Moved]:
        """Fulfil a wish. Raises ``PenstockError`` where a slot stays where it was, and ``Lost`` where the topology
        has to be started again."""
        done = []
        for slot, node in sorted(wish.nodes.items()):
            move = Move(len(self.done) + 1, start, slot, node, self._go_on)
            done.append(move.carry_out())
            self.done.append(done[-1])
            start.bus.note("move", "", f"{wish.reason}: {done[-1]}")
        return done


class _Stuck(Exception):
    """It goes no further."""


class Move:
    """One slot's."""

    def __init__(self, number: int, start: Start, slot: SlotId, node: str, go_on: Callable[[], None]) -> None:
        """Raises ``TopologyFailed`` where it cannot be."""
        self._number, self._start, self._slot, self._go_on = number, start, slot, go_on
        self._crew, self._limit = start.crew, start.settings.drain_timeout
        crew = self._crew
        if slot not in movable(start, {slot: node}):
            free = {each.hello.node for id, each in crew.seats.items() if each.free and id.stage == slot.stage}
            now = crew.slots[slot].hello.node if slot in crew.slots else "no node"
            seats = ", ".join(sorted(free)) or "no node"
            raise TopologyFailed(
                f"topology '{start.design.topology.name}'",
                "a slot of bolts moves alone from where it is to another node that has a free seat for its stage",
                f"slot {slot}, on {now}, to {node}; seats are free on {seats}",
                "Start it with spare_seats=1 or more, or let it be replaced: handle.place().",
            )
        self._old, self._old_seat = crew.slots[slot], crew.seating[slot]
        self._seat = next(
            seat
            for seat, each in sorted(crew.seats.items())
            if each.free and seat.stage == slot.stage and each.hello.node == node
        )
        self._new = crew.seats[self._seat]
        self._crash = CrashPoint(start.settings.crash_at, "driver")
        self._stoppable = True
        self._since = time.monotonic()
        self._times: dict[str, float] = {}

    def carry_out(self) -> Moved:
        """Raises ``PenstockError`` where the slot stays, ``Lost`` where the topology has to be started again."""
        start, old, new = self._start, self._old, self._new
        start.begin_handover()
        commits = start.expect_commits()
        try:
            try:
                self._take_seat()
                commits.pause()
                self._double()
                self._store()
            except Lost as loss:  # maybe told to stop: what is there is to end its work
                self._give_up(str(loss))
                raise
            except (_Stuck, PenstockError) as error:
                self._give_up(str(error))
                start.raise_if_dead()
                name = f"topology '{start.design.topology.name}'"
                rule = f"slot {self._slot} must be able to move to {new.hello.node}"
                raise TopologyFailed(name, rule, str(error), "It goes on where it was.") from error
            try:
                self._merge()
                self._switch()
            except (_Stuck, PenstockError) as error:  # nobody has the slot now
                self._crew.hand_over(self._slot, self._old_seat)  # which is where it is started again
                raise Lost(f"slot {self._slot} cannot go on on {new.hello.node}: {error}") from error
        finally:
            commits.resume()
        begun, ended = old.left_at, self._times["merged"]
        steps = {step: at - self._since for step, at in self._times.items()}
        return Moved(ended, self._slot, old.hello.node, new.hello.node, ended - begun, ended - self._since, steps)

    # ---- the steps -------------------------------------------------------------------------------------

    def _take_seat(self) -> None:
        start, crew, slot = self._start, self._crew, self._slot
        crew.stand_by(slot, self._seat)
        with contextlib.suppress(StateError):  # an overloaded one may take long: the last one there is will do
            start.expect_commits().commit_now(self._limit, go_on=self._watch)
        state = start.design.state
        state.look()
        crew.tell(self._new, ReadAhead(state.epoch, crew.share(slot, state.tasks())))
        self._await(lambda: self._new.ahead >= state.epoch, "the new seat must read the state ahead")
        self._reached("seated")

    def _double(self) -> None:
        self._send_to(self._old_seat, self._seat)
        self._reached("doubled")

    def _store(self) -> None:
        commits, old = self._start.expect_commits(), self._old
        self._await(lambda: commits.commits.idle, "commits that are under way must end")
        commit, epoch = commits.commits.next_move()
        self._crew.tell(old, Leave(commit, epoch))
        self._await(lambda: old.leaving == commit, "the old seat must know when to leave")
        commits.commit_with_move(self._limit, self._watch)
        self._await(lambda: old.left is not None and old.left.epoch == epoch, "the old seat must leave")
        self._reached("stored")

    def _merge(self) -> None:
        start, crew, slot, old, new = self._start, self._crew, self._slot, self._old, self._new
        assert old.left is not None
        self._stoppable, self._limit = False, start.settings.start_timeout
        state = start.design.state
        state.look()
        crew.hand_over(slot, self._seat)
        crew.tell(old, Close())  # first, for both may use one thing outside, as a transaction or a file
        self._await(lambda: old.closed, "the tasks must close on the old node")
        self._reached("mapped")
        tasks = crew.share(slot, state.tasks())
        crew.tell(new, Open(crew.nodes(), state.generation, old.left.epoch, tasks, old.left.memo))
        for order in start.migrations.orders():
            crew.tell(new, order)
        self._await(lambda: new.ready, "the tasks must open on the new node")
        self._reached("merged")

    def _switch(self) -> None:
        self._send_to(self._seat)
        self._reached("switched")

    # ---- what they have in common ----------------------------------------------------------------------

    def _send_to(self, *seats: SlotId) -> None:
        """Have all slots of the stage before send to these seats, and wait until they do."""
        numbers, slot = [seat.slot for seat in seats], self._slot
        for sender in self._senders:
            self._crew.tell(sender, SendTo(slot.slot, numbers))
        self._await(
            lambda: all(sender.sending.get(slot.slot) == numbers for sender in self._senders),
            f"all slots of stage {slot.stage - 1} must send to the seats {numbers}",
        )

    def _give_up(self, why: str) -> None:
        """The old seat has had everything, and goes on. The new one may still get a copy of something, and is not
        used again."""
        crew = self._crew
        log.warning("slot %s stays on %s: %s", self._slot, self._old.hello.node, why)
        self._new.problem = self._new.problem or why
        for sender in self._senders:
            crew.tell(sender, SendTo(self._slot.slot, [self._old_seat.slot]))
        self._old.left, self._old.leaving = None, 0
        crew.tell(self._old, Stay())
        crew.tell(self._new, Close())

    def _await(self, condition: Callable[[], bool], rule: str) -> None:
        old, new, deadline = self._old, self._new, time.monotonic() + self._limit

        def over() -> bool:
            return condition() or bool(new.problem or old.problem) or self._crew.broken

        while not self._start.wait(over, LOOK):
            self._watch()
            if time.monotonic() > deadline:
                raise _Stuck(f"{rule} within {self._limit:g} s")
        self._watch()
        if not condition():
            raise _Stuck(new.problem or old.problem or f"{rule}: a slot is gone")

    @property
    def _senders(self) -> list[Connection]:
        return [each for id, each in self._crew.slots.items() if id.stage == self._slot.stage - 1]

    def _watch(self) -> None:
        """While nobody has the slot, also who is told to stop waits: what is there can be ended then."""
        if self._stoppable:
            self._go_on()
        self._start.raise_if_dead()
        self._start.raise_if_silent()

    def _reached(self, step: str) -> None:
        """The step has been done. Crash tests die here."""
        self._times[step] = time.monotonic()
        self._crash(step, self._number)
