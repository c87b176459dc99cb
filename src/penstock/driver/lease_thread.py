"""The thread with which a driver shows that it is alive, and finds out that another has taken over."""

from __future__ import annotations

import logging
import threading

from penstock.errors import StateError, StateRemoved, Superseded
from penstock.state.generations import Ownership
from penstock.state.lease import BEAT, check_free, this_process
from penstock.state.store import StateStore

log = logging.getLogger("penstock.lease")

_held: set[str] = set()
"""Tokens of the drivers in this process that hold a state directory."""


class Lease:
    """On one state directory, from ``take`` to ``release``."""

    def __init__(self, store: StateStore, topology: str, beat: float = BEAT) -> None:
        self.owner = Ownership(topology, this_process())
        self.error: StateError | None = None
        """Set when another driver has taken over, or the directory is gone."""
        self._store, self._topology, self._beat = store, topology, beat
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lease", daemon=True)

    def take(self, take_over: bool = False) -> None:
        """Raises ``AlreadyRunning`` if a driver that is alive owns the directory. With ``take_over`` that one is
        ended, not here but by the first claim of this driver: when it is ready to run."""
        self._store.check_owner()
        if not self._store.exclusive:
            log.warning(
                "state store %s is not known to create files exclusively: do not start topology '%s' twice at the "
                "same moment",
                self._store.url,
                self._topology,
            )
        if not take_over:
            check_free(self._store, self._topology, _held.__contains__, log.warning)
            self.owner.claim(self._store)
        _held.add(self.owner.token)
        self._thread.start()

    def release(self) -> None:
        """End the thread, and let others start at once."""
        self._over.set()
        if self._thread.ident is not None:
            self._thread.join(10)
        _held.discard(self.owner.token)
        if self.error is None:
            try:
                self.owner.release(self._store)
            except StateError as error:
                log.warning(
                    "the lease could not be released, so the next driver waits until it expires: %s", error
                )

    def _run(self) -> None:
        while not self._over.wait(self._beat):
            if not self.owner.generation:
                continue  # it takes over later
            try:
                self.owner.beat(self._store)
            except (Superseded, StateRemoved) as error:
                self.error = error
                _held.discard(self.owner.token)
                return
            except StateError as error:
                log.warning("no sign of life: %s", error)
