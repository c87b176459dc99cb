"""What changes a topology while it runs: it is replaced by another form of itself, or single slots of it move.
Wishes for that come from people, on any thread, and from the policies of scaling and placement; the supervisor
has them carried out, one at a time."""

from __future__ import annotations

import contextlib
import queue
import time
from collections.abc import Callable
from typing import Protocol

from penstock.coordinator.load_monitor import LoadMonitor
from penstock.coordinator.load_window import Window
from penstock.coordinator.placements import Placements
from penstock.coordinator.scalings import Scalings
from penstock.errors import PenstockError, TopologyFailed
from penstock.spark.moving import Moved, Mover, MoveWish
from penstock.spark.placing import Placer, Wish
from penstock.spark.replacement import Replaced, Replacer, ReplaceWish, WentBack
from penstock.spark.start import Lost, Start, Starter


class Owner(Protocol):
    """Whose changes they are."""

    state: str
    current: Start
    """The start that owns the topology's state and has its spouts: a replacement hands that over."""
    monitor: LoadMonitor


class Changes:
    """Of one topology. Any thread may ask with ``replace`` and ``move``, or ``refuse``; the rest is for one at a
    time."""

    def __init__(self, owner: Owner, starter: Starter) -> None:
        self._owner, self._starter = owner, starter
        self._replacer = Replacer(starter)
        self._mover = Mover(starter.go_on)
        self.scalings = self._make_scalings()
        """What was decided about the number of tasks, and on what grounds."""
        self.placements = Placements(owner.current.settings)
        """What was decided about where slots are."""
        self.placer = Placer(starter, self.placements)
        self._wishes: queue.SimpleQueue[Wish] = queue.SimpleQueue()
        self._scaling_at = 0.0

    @property
    def replaced(self) -> list[Replaced]:
        """Oldest first."""
        return self._replacer.done

    @property
    def moved(self) -> list[Moved]:
        """Oldest first."""
        return self._mover.done

    # ---- wishes ----------------------------------------------------------------------------------------

    def replace(self, wish: ReplaceWish) -> Replaced:
        """Returns when it is done. Raises what keeps it from that."""
        self._ask(wish)
        return wish.answer.result()

    def move(self, wish: MoveWish) -> list[Moved]:
        """Returns when it is done. Raises what keeps it from that."""
        self._ask(wish)
        return wish.answer.result()

    def _ask(self, wish: Wish) -> None:
        self._wishes.put(wish)
        if self._starter.stopping.is_set():  # nobody may look there any more
            self.refuse()

    def asked(self, timeout: float) -> Wish | None:
        """What somebody wishes for, if a wish comes in time."""
        with contextlib.suppress(queue.Empty):
            return self._wishes.get(timeout=timeout)
        return None

    def decided(self, window: Window | None) -> Wish | None:
        """What the policies wish for, asked again and again while the spouts are active; with a window when one of
        the load monitor's has just ended."""
        return self._scaling() or self.placer.next(window, self._owner.current)

    def refuse(self) -> None:
        """There is nothing to change any more."""
        while (wish := self.asked(0.0)) is not None:
            wish.answer.set_exception(self._failed("must be running", self._owner.state))

    def _scaling(self) -> ReplaceWish | None:
        """Once a window of its own."""
        current, now = self._owner.current, time.monotonic()
        if self.scalings.idle or now < self._scaling_at:
            return None
        self._scaling_at = now + current.settings.scaling_window
        scale = self.scalings.look(now, current.bus.tasks())
        topology = current.design.topology
        return None if scale is None else ReplaceWish(topology.scaled(scale.parallelism), scale.reason)

    def _make_scalings(self) -> Scalings:
        current = self._owner.current
        return Scalings(current.plan, current.design.topology, current.settings, self._starter.room)

    # ---- carrying them out -----------------------------------------------------------------------------

    def carry_out(self, wish: Wish, let_go: Callable[[Start], None]) -> None:
        """``let_go`` has a start's spouts emit. Raises where the current start is lost on the way; what else goes
        wrong is for who waits."""
        owner = self._owner
        try:
            if owner.state not in ("active", "inactive"):
                raise self._failed("must be running", owner.state)
            if not wish.fits(owner.current):
                raise self._failed(
                    "is moved as it was seen", "it has been started again or replaced", "Ask again."
                )
            if isinstance(wish, MoveWish):
                self._move(wish)
            else:
                self._replace(wish, let_go)
        except PenstockError as error:
            self._not_done(wish, error)
        except WentBack as back:
            self._not_done(wish, back.error)
            raise
        except Lost as loss:
            self._not_done(wish, self._failed(f"must stay alive for a {wish.kind}", str(loss)))
            raise
        except BaseException as error:  # who waits must hear of it, whatever it is
            wish.answer.set_exception(error)
            raise

    def _replace(self, wish: ReplaceWish, let_go: Callable[[Start], None]) -> None:
        owner, before = self._owner, self._owner.current.settings
        done = self._replacer.replace(wish, owner.current, let_go, self._hand_over)
        now = owner.current
        if now.settings == before:
            self.scalings.replaced(now.plan, now.design.topology, time.monotonic())
        else:
            self.scalings = self._make_scalings()
            self.placements.use(now.settings)
            owner.monitor.use(now.settings)
        wish.answer.set_result(done)

    def _hand_over(self, start: Start) -> None:
        self._owner.current = start

    def _move(self, wish: MoveWish) -> None:
        owner, before = self._owner, len(self.moved)
        try:
            done = self._mover.move(wish, owner.current)
        finally:
            if len(self.moved) > before:  # a window with a slot on two nodes says nothing
                owner.monitor.use(owner.current.settings)
        wish.answer.set_result(done)

    def _not_done(self, wish: Wish, error: PenstockError) -> None:
        self._owner.current.bus.note(wish.kind, "", f"not done: {error}")
        self.placer.failed(wish)
        wish.answer.set_exception(error)

    def _failed(self, rule: str, got: str, way_out: str = "") -> TopologyFailed:
        return TopologyFailed(f"topology '{self._owner.current.design.topology.name}'", rule, got, way_out)

    def stop_replaced(self, at_once: bool = False) -> None:
        """Stop the query that was replaced at last, when its time has come."""
        self._replacer.stop_retired(at_once)
