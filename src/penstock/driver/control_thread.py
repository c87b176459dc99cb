"""Runs the data migration controller periodically on the driver, and sends its route changes to the workers."""

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
    """The control loop of one query run, which begins with the routes of the plan."""

    def __init__(
        self, migrations: MigrationController, bus: MetricsBus, send: Callable[[Command], None], interval: float
    ) -> None:
        """``send`` is called on this thread, once per route change. ``interval``: seconds between two
        decisions."""
        self._migrations, self._bus, self._send, self._interval = migrations, bus, send, interval
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="control", daemon=True)

    def start(self) -> None:
        """Start the thread, unless no component's data may be migrated."""
        if not self._migrations.idle:
            self._thread.start()

    def stop(self) -> None:
        """Tell the thread to end. Does not wait for it."""
        self._ended.set()

    def _run(self) -> None:
        for command in self._migrations.begin():
            self._send(command)
        while not self._ended.wait(self._interval):
            try:
                for command in self._migrations.decide(
                    time.monotonic(), self._bus.loads(), self._bus.load().links
                ):
                    self._send(command)
            except Exception:  # an error must not end the thread, which would freeze the routes
                log.exception("data migration failed; it is tried again after the next interval")
