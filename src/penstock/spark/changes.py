"""What changes a topology while it runs: it is replaced by another form of itself, or single workers of it move.
Wishes for that come from people, on any thread, and from the policies of scaling and placement; the supervisor
has them carried out, one at a time."""

from __future__ import annotations

import contextlib
import queue
import time
from collections.abc import Callable
from typing import Protocol

from penstock.driver.load_monitor import LoadMonitor
from penstock.driver.load_sample import MonitorSample
from penstock.driver.placement_controller import PlacementController
from penstock.driver.scaling_controller import ScalingController
from penstock.errors import PenstockError, TopologyFailed
from penstock.spark.move import Moved, Mover, MoveRequest
from penstock.spark.placing import ChangeRequest, Placer
from penstock.spark.query_run import QueryLauncher, QueryLost, QueryRun
from penstock.spark.replacement import Replaced, Replacer, ReplaceRequest, WentBack


class Owner(Protocol):
    """Whose changes they are."""

    state: str
    current: QueryRun
    """The start that owns the topology's state and has its spouts: a replacement hands that over."""
    monitor: LoadMonitor


class Changes:
    """Of one topology. Any thread may ask with ``replace`` and ``move``, or ``refuse``; the rest is for one at a
    time."""

    def __init__(self, owner: Owner, starter: QueryLauncher) -> None:
        self._owner, self._starter = owner, starter
        self._replacer = Replacer(starter)
        self._mover = Mover(starter.go_on)
        self.scalings = self._make_scalings()
        """What was decided about the number of tasks, and on what grounds."""
        self.placements = PlacementController(owner.current.settings)
        """What was decided about where workers are."""
        self.placer = Placer(starter, self.placements)
        self._requests: queue.SimpleQueue[ChangeRequest] = queue.SimpleQueue()
        self._scaling_at = 0.0

    @property
    def replaced(self) -> list[Replaced]:
        """Oldest first."""
        return self._replacer.done

    @property
    def moved(self) -> list[Moved]:
        """Oldest first."""
        return self._mover.done

    # ---- requests ----------------------------------------------------------------------------------------

    def replace(self, request: ReplaceRequest) -> Replaced:
        """Returns when it is done. Raises what keeps it from that."""
        self._ask(request)
        return request.answer.result()

    def move(self, request: MoveRequest) -> list[Moved]:
        """Returns when it is done. Raises what keeps it from that."""
        self._ask(request)
        return request.answer.result()

    def _ask(self, request: ChangeRequest) -> None:
        self._requests.put(request)
        if self._starter.stopping.is_set():  # nobody may look there any more
            self.refuse()

    def asked(self, timeout: float) -> ChangeRequest | None:
        """What somebody requests, if a request comes in time."""
        with contextlib.suppress(queue.Empty):
            return self._requests.get(timeout=timeout)
        return None

    def decided(self, sample: MonitorSample | None) -> ChangeRequest | None:
        """What the policies request for, asked again and again while the spouts are active; with a load sample
        when one of the load monitor's has just ended."""
        return self._scaling() or self.placer.next(sample, self._owner.current)

    def refuse(self) -> None:
        """There is nothing to change any more."""
        while (request := self.asked(0.0)) is not None:
            request.answer.set_exception(self._failed(f"it is {self._owner.state}, not running"))

    def _scaling(self) -> ReplaceRequest | None:
        """Once a window of its own."""
        current, now = self._owner.current, time.monotonic()
        if self.scalings.idle or now < self._scaling_at:
            return None
        self._scaling_at = now + current.settings.scaling.window
        scale = self.scalings.decide(now, current.bus.tasks())
        topology = current.deployment.topology
        return None if scale is None else ReplaceRequest(topology.scaled(scale.parallelism), scale.reason)

    def _make_scalings(self) -> ScalingController:
        current = self._owner.current
        return ScalingController(current.plan, current.deployment.topology, current.settings, self._starter.room)

    # ---- carrying them out -----------------------------------------------------------------------------

    def carry_out(self, request: ChangeRequest, let_go: Callable[[QueryRun], None]) -> None:
        """``let_go`` has a start's spouts emit. Raises where the current start is lost on the way; what else goes
        wrong is for who waits."""
        owner = self._owner
        try:
            if owner.state not in ("active", "inactive"):
                raise self._failed(f"it is {owner.state}, not running")
            if not request.fits(owner.current):
                raise self._failed(
                    "it has been started again or replaced since the change was requested", "Request it again."
                )
            if isinstance(request, MoveRequest):
                self._move(request)
            else:
                self._replace(request, let_go)
        except PenstockError as error:
            self._not_done(request, error)
        except WentBack as back:
            self._not_done(request, back.error)
            raise
        except QueryLost as loss:
            self._not_done(request, self._failed(f"it was lost during a {request.kind}: {loss}"))
            raise
        except BaseException as error:  # who waits must hear of it, whatever it is
            request.answer.set_exception(error)
            raise

    def _replace(self, request: ReplaceRequest, let_go: Callable[[QueryRun], None]) -> None:
        owner, before = self._owner, self._owner.current.settings
        done = self._replacer.replace(request, owner.current, let_go, self._hand_over)
        now = owner.current
        if now.settings == before:
            self.scalings.replaced(now.plan, now.deployment.topology, time.monotonic())
        else:
            self.scalings = self._make_scalings()
            self.placements.apply_settings(now.settings)
            owner.monitor.apply_settings(now.settings)
        request.answer.set_result(done)

    def _hand_over(self, start: QueryRun) -> None:
        self._owner.current = start

    def _move(self, request: MoveRequest) -> None:
        owner, before = self._owner, len(self.moved)
        try:
            done = self._mover.move(request, owner.current)
        finally:
            if len(self.moved) > before:  # a load sample with a worker on two nodes says nothing
                owner.monitor.apply_settings(owner.current.settings)
        request.answer.set_result(done)

    def _not_done(self, request: ChangeRequest, error: PenstockError) -> None:
        self._owner.current.bus.note(request.kind, "", f"not done: {error}")
        self.placer.failed(request)
        request.answer.set_exception(error)

    def _failed(self, problem: str, hint: str = "") -> TopologyFailed:
        return TopologyFailed(f"topology '{self._owner.current.deployment.topology.name}'", problem, hint)

    def stop_replaced(self, at_once: bool = False) -> None:
        """Stop the query that was replaced at last, when its time has come."""
        self._replacer.stop_retired(at_once)
