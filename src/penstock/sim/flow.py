"""Flow control of links: the plain nodes of *Sun 2022* stop and resume their senders; Flink's receivers grant
credits."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import simpy

from penstock.sim.network import LinkControl, SimLink

Process = Generator[Any, Any, None]

RESUME = 0.5
"""*Sun 2022*, section 3.1: a node whose queue has shrunk to this share tells its senders to continue."""

GRANT_INTERVAL = 0.1
"""Seconds between two grants. *Sun 2022* says only "at intervals"; a short one, so that credit loses no more
throughput than it must."""


class StopResume(LinkControl):
    """The receiver closes the link when its queue is full and opens it when the queue is down to half. Both take
    effect after the link's delay."""

    def __init__(self, link: SimLink) -> None:
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
    """The link is open while fewer packets were sent than granted. The receiver grants the number of this link's
    packets that it has taken plus the link's share of its queue, so there is always room for what is sent (*Sun
    2022*, figure 5)."""

    def __init__(self, env: simpy.Environment, link: SimLink) -> None:
        self._link = link
        self._share = link.target.spec.queue // link.target.senders
        assert self._share, f"the queue of {link.target.spec.name} must have room for one packet of each sender"
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
