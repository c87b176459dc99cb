"""When a sender must wait: D's plain nodes stop and resume their senders, Flink's downstream grants credits."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import simpy

from penstock.sim.network import Link, LinkControl

Process = Generator[Any, Any, None]

RESUME = 0.5
"""D §3.1: a node whose queue is down to half tells its senders to go on."""

GRANT_INTERVAL = 0.1
"""Seconds between two grants. D: "every so often"; short, so that credit loses nothing but what it must."""


class StopResume(LinkControl):
    """Closed by the receiver when its queue is full, opened when it is down to half; after the link's delay."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._stopped = False
        self._open = True
        link.control = self
        link.target.on_queue.append(self._check_queue)

    @property
    def open(self) -> bool:
        return self._open

    def _check_queue(self) -> None:
        use = self._link.target.queue_use
        if (use >= 1.0 and not self._stopped) or (use <= RESUME and self._stopped):
            self._stopped = not self._stopped
            self._link.signal(self._close if self._stopped else self._resume)

    def _close(self) -> None:
        self._open = False

    def _resume(self) -> None:
        self._open = True
        self._link.source.wake()


class Credit(LinkControl):
    """Open while fewer packets were sent than the receiver granted: those of this link it took, and the link's
    share of its queue. So what is sent always has room (D figure 5)."""

    def __init__(self, env: simpy.Environment, link: Link) -> None:
        self._link = link
        self._share = link.target.spec.queue // link.target.senders
        assert self._share, f"{link.target.spec.name}: a queue has room for one packet of each sender"
        self._sent = 0
        self._granted = self._share
        link.control = self
        env.process(self._grant(env))

    @property
    def open(self) -> bool:
        return self._sent < self._granted

    def record_sent(self) -> None:
        self._sent += 1

    def _grant(self, env: simpy.Environment) -> Process:
        announced = self._granted
        while True:
            yield env.timeout(GRANT_INTERVAL)
            granted = self._link.taken + self._share
            if granted > announced:
                announced = granted
                self._link.signal(lambda granted=granted: self._on_grant(granted))  # type: ignore[misc]

    def _on_grant(self, granted: int) -> None:
        self._granted = granted
        self._link.source.wake()
