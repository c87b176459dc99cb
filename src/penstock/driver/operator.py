"""Carries out the commands that operators send to a running topology from another process, such as ``penstock
status``, ``set`` and ``kill``."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any

from penstock.driver.handle import RunningTopology
from penstock.driver.requests import Moved, Replaced
from penstock.errors import PenstockError, SettingError, TopologyFailed
from penstock.protocol.requests import OperatorAnswer, OperatorRequest

log = logging.getLogger("penstock.driver")


class Operator:
    """Carries out commands on one topology. The coordinator calls it on several threads at a time. Errors are
    returned as part of the answer."""

    def __init__(self, running: RunningTopology) -> None:
        self._running = running
        self._commands: dict[str, Callable[[Mapping[str, Any]], str]] = {
            "status": self._status,
            "queues": self._queues,
            "placement": self._placement,
            "rearrange": self._rearrange,
            "move": self._move,
            "spread": self._spread,
            "set": self._set,
            "activate": self._activate,
            "deactivate": self._deactivate,
            "scale": self._scale,
            "refit": self._refit,
            "replace": self._replace,
            "kill": self._kill,
        }

    def __call__(self, command: OperatorRequest) -> OperatorAnswer:
        try:
            carry_out = self._commands.get(command.name)
            if carry_out is None:
                raise SettingError(
                    f"topology '{self._running.name}'",
                    f"there is no command '{command.name}', only {', '.join(self._commands)}",
                    "It may run with another version of Penstock.",
                )
            return OperatorAnswer(carry_out(command.arguments))
        except PenstockError as error:
            return _refusal(error)
        except (LookupError, TypeError, ValueError) as error:
            return _refusal(
                SettingError(
                    f"command '{command.name}'", f"its arguments are wrong ({type(error).__name__}: {error})"
                )
            )
        except Exception as error:
            log.exception("command '%s'", command.name)
            text = f"internal error (please report it): {type(error).__name__}: {error}"
            return _refusal(TopologyFailed(f"command '{command.name}'", text))

    def _status(self, arguments: Mapping[str, Any]) -> str:
        return json.dumps(self._running.status().to_json(), default=str)

    def _queues(self, arguments: Mapping[str, Any]) -> str:
        return json.dumps([dataclasses.asdict(queue) for queue in self._running.internals.bus.queues()])

    def _placement(self, arguments: Mapping[str, Any]) -> str:
        return self._running.internals.placing.explain()

    def _rearrange(self, arguments: Mapping[str, Any]) -> str:
        done = self._running.internals.placing.rearrange()
        if done is None:
            return ""
        return self._done(done) if isinstance(done, Replaced) else _moved(done)

    def _move(self, arguments: Mapping[str, Any]) -> str:
        return _moved([self._running.move(str(arguments["worker"]), str(arguments["node"]))])

    def _spread(self, arguments: Mapping[str, Any]) -> str:
        return json.dumps(self._running.internals.placing.spread())

    def _set(self, arguments: Mapping[str, Any]) -> str:
        self._running.internals.set_max_rates(arguments)
        return ""

    def _activate(self, arguments: Mapping[str, Any]) -> str:
        self._running.activate()
        return ""

    def _deactivate(self, arguments: Mapping[str, Any]) -> str:
        self._running.deactivate()
        return ""

    def _scale(self, arguments: Mapping[str, Any]) -> str:
        reason, pause = str(arguments.get("reason", "by hand")), bool(arguments.get("pause"))
        return self._done(self._running.scale(arguments["parallelism"], reason, pause))

    def _refit(self, arguments: Mapping[str, Any]) -> str:
        workers = arguments.get("workers")
        done = self._running.refit(None if workers is None else int(workers))
        return "" if done is None else self._done(done)

    def _replace(self, arguments: Mapping[str, Any]) -> str:
        return self._done(self._running.internals.reload(str(arguments["target"]), bool(arguments.get("pause"))))

    @staticmethod
    def _done(replaced: Replaced) -> str:
        return json.dumps(dataclasses.asdict(replaced))

    def _kill(self, arguments: Mapping[str, Any]) -> str:
        """Answer as soon as the tasks are closed, because the coordinator closes the operator's connection when
        the topology ends."""
        running = self._running

        def end() -> None:
            with contextlib.suppress(PenstockError):  # it is also in ``running.error``
                running.kill(drain=bool(arguments.get("drain", True)))

        threading.Thread(target=end, name="kill", daemon=True).start()
        running.internals.closing.wait()
        if running.error is not None:
            raise running.error
        return running.internals.left_behind


def _refusal(error: PenstockError) -> OperatorAnswer:
    return OperatorAnswer("", [error.where, error.problem, error.hint], type(error).__name__)


def _moved(done: list[Moved]) -> str:
    return json.dumps({"moves": [each.to_json() for each in done]})
