"""The control loop on the driver: at each interval what the tasks report goes to the policies, and what they
decide to the workers."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from penstock.driver.migration_controller import MigrationController
from penstock.metrics.bus import MetricsBus
from penstock.protocol.commands import Command

log = logging.getLogger("penstock.migration")


class ControlThread:
    """Of one query run, which begins with the routes of the plan."""

    def __init__(
        self, migrations: MigrationController, bus: MetricsBus, send: Callable[[Command], None], interval: float
    ) -> None:
        self._migrations, self._bus, self._send, self._interval = migrations, bus, send, interval
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="control", daemon=True)

    def start(self) -> None:
        if not self._migrations.idle:
            self._thread.start()

    def stop(self) -> None:
        self._ended.set()

    def _run(self) -> None:
        while not self._ended.wait(self._interval):
            try:
                for order in self._migrations.decide(time.monotonic(), self._bus.loads()):
                    self._send(order)
            except Exception:  # a policy that fails must not leave the routes as they are for ever, unseen
                log.exception("data migration: looked in vain, tries again")
