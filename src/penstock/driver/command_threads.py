"""Runs the commands of operators on threads."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future

from penstock.protocol.requests import OperatorAnswer, OperatorRequest

_MOST_OF_A_KIND = 32
"""Commands of the same name that run at a time. Changes are made one after the other, so more of them would only
wait; the number is far above what several people and a monitoring system send at the same time."""


class CommandThreads:
    """Runs each command on a thread of its own, so that commands that wait, for example for a change that takes
    minutes, do not delay ``status`` and ``kill``. The threads are daemons: a command that never returns does not
    keep the process alive."""

    def __init__(self) -> None:
        self._running: Counter[str] = Counter()
        self._lock = threading.Lock()

    async def run(
        self, operator: Callable[[OperatorRequest], OperatorAnswer], request: OperatorRequest
    ) -> OperatorAnswer:
        """Return the operator's answer to the request, or a refusal if too many requests of the same name are
        running. Raises what the operator raises. If the caller is cancelled, the command runs on."""
        with self._lock:
            if self._running[request.name] >= _MOST_OF_A_KIND:
                return _refusal(request.name)
            self._running[request.name] += 1
        answer: Future[OperatorAnswer] = Future()
        answer.set_running_or_notify_cancel()  # from now on it cannot be cancelled
        arguments = (operator, request, answer)
        threading.Thread(
            target=self._carry_out, args=arguments, name=f"command-{request.name}", daemon=True
        ).start()
        return await asyncio.wrap_future(answer)

    def _carry_out(
        self,
        operator: Callable[[OperatorRequest], OperatorAnswer],
        request: OperatorRequest,
        answer: Future[OperatorAnswer],
    ) -> None:
        error: BaseException | None = None
        try:
            result = operator(request)
        except BaseException as raised:  # raised again where the answer is awaited
            error = raised
        with self._lock:  # before the answer, so that whoever has it may send the command again
            self._running[request.name] -= 1
            if not self._running[request.name]:
                del self._running[request.name]
        if error is None:
            answer.set_result(result)
        else:
            answer.set_exception(error)


def _refusal(name: str) -> OperatorAnswer:
    return OperatorAnswer(
        "",
        [
            f"command '{name}'",
            f"{_MOST_OF_A_KIND} commands of this kind are waiting for their result already",
            "Try again when they are done; penstock status shows what the topology does.",
        ],
        "TopologyFailed",
    )
