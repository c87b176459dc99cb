"""Part of the fault tests' driver: replaces the topology or moves its workers repeatedly, and kills a process at
the step that the ambush file names."""

import contextlib
import itertools
import json
import os
import signal
import threading

from penstock.driver.engine import executor_of
from penstock.errors import PenstockError


class Scaler:
    """Gives ``count`` each of ``config["scale"]`` tasks, one after the other, round and round; or, without any,
    moves all workers to some of the nodes and leaves the others, and takes those back; or, where slots are kept
    free, moves the workers of bolts to and fro, one by one.

    The file ``config["ambush"]``, if there is one, says whom to kill at which step of the next replacement or
    move: ``{"step", "delay", "of", "pick"}``, ``of`` the old start or slot, the new one, any ``other`` worker, or
    the driver, ``pick`` from 0 to 1 for the worker, ``delay`` in seconds after the step. It is taken once.
    """

    def __init__(self, running, config):
        self._running, self._config = running, config
        self._step = ""
        self._move_now = None
        self._done, self._turn, self._refused, self._struck = 0, 0, [], []
        self._look_at_steps()
        threading.Thread(target=self._scale, name="scaler", daemon=True).start()

    def status(self):
        running = self._running
        registries = {registry.attempt: pids(registry) for registry in running.internals.server.registries}
        return {
            "start": running.internals.supervisor.runs.current.number,
            "tasks": len(running.internals.plan.tasks_of["count"]),
            "replaced": self._done,
            "refused": list(self._refused),
            "step": self._step,
            "worker registries": registries,
            "struck": list(self._struck),
        }

    def _scale(self):
        self._running.internals.server.wait(
            lambda: self._running.internals.committed >= 2, 60
        )  # there is something to hand over
        for tasks in itertools.cycle(self._config["scale"] or [None]):
            try:
                if self._running.internals.topology.settings.placement.spare_slots:
                    if not self._move_one():
                        self._running.internals.server.wait(lambda: False, 0.2)  # it is being started again
                        continue
                elif tasks is None:
                    self._move()
                else:
                    self._running.scale({"count": tasks})
                self._done += 1
            except PenstockError as error:
                if self._running.state in ("ending", "ended", "failed"):
                    return
                self._refused.append(str(error))
            self._step = ""

    def _move(self):
        running = self._running
        if running.internals.placing.nodes_away:
            before = len(running.internals.replacements)
            running.internals.placing.spread()
            running.internals.server.wait(
                lambda: len(running.internals.replacements) > before, 30
            )  # or it was struck
            return
        active = running.internals.supervisor.engine.nodes()
        nodes = [
            node for node in sorted(running.internals.supervisor.runs.current.nodes) if executor_of(node) in active
        ]
        if not nodes:  # of a move that was struck: what it left takes nothing new
            running.scale({})
            return
        kept = nodes[self._done % len(nodes)]
        others = [f"/{each}" for each in active if each != executor_of(kept)]
        running.place(dict.fromkeys(dict(running.internals.workers), kept), "moved", leave=others)

    def _move_one(self):
        """Each worker in its turn, to whatever other node has a slot for it; False: none has."""
        running = self._running
        registry = running.internals.supervisor.runs.current.registry
        workers = [worker for worker in sorted(registry.workers) if worker.stage] or [None]
        worker = workers[self._turn % len(workers)]
        self._turn += 1
        free = {
            c.hello.node
            for slot, c in list(registry.slots.items())
            if c.free and worker and slot.stage == worker.stage
        }
        elsewhere = sorted(free - {registry.workers[worker].hello.node}) if free else []
        if elsewhere:
            running.move(worker, elsewhere[0])
        return bool(elsewhere)

    def _look_at_steps(self):
        runner = self._running.internals.supervisor.runner
        reached = runner.reached

        def look(change, step):
            if change.kind in ("replacement", "move"):
                self._step, self._move_now = step, change if change.kind == "move" else None
                self._ambush(step)
            reached(change, step)

        runner.reached = look

    def _ambush(self, step):
        path = self._config["ambush"]
        try:
            with open(path) as file:
                plan = json.load(file)
        except OSError:
            return
        if plan["step"] != step:
            return
        os.remove(path)
        if plan["delay"]:
            threading.Timer(plan["delay"], self._strike, [plan]).start()
        else:
            self._strike(plan)

    def _strike(self, plan):
        if plan["of"] == "driver":
            os.kill(os.getpid(), signal.SIGKILL)
        registries = self._running.internals.server.registries
        victims = sorted(pids(registries[0 if plan["of"] == "old" else -1]).items())
        if self._move_now is not None and plan["of"] != "other":
            slot = self._move_now.old if plan["of"] == "old" else self._move_now.new
            victims = [(f"{slot.id} in its {plan['of']} slot", slot.hello.pid)]
        if not victims:  # the new one has no workers yet
            victims = sorted(pids(registries[0]).items())
        worker, pid = victims[int(plan["pick"] * len(victims))]
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        self._struck.append(f"worker {worker} of {len(registries)} starts, in step '{self._step}'")


def pids(registry):
    return {str(id): worker.hello.pid for id, worker in dict(registry.workers).items() if worker.connected}
