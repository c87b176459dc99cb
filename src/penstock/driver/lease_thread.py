"""Holds the lease on a state directory: a thread renews it to show that the driver is alive, and detects that
another driver has taken over."""

from __future__ import annotations

import logging
import threading

from penstock.errors import StateError, StateRemoved, Superseded
from penstock.redaction import redacted
from penstock.state.generations import Ownership
from penstock.state.lease import BEAT, LEASE, check_free, this_process
from penstock.state.store import StateStore

log = logging.getLogger("penstock.lease")

_JOIN_TIMEOUT = 10.0
"""Seconds to wait for a renewal in progress and for the release. A store that does not answer must not keep the
driver from ending."""

_held: set[str] = set()
"""Tokens of the drivers in this process that hold a lease on a state directory."""


class Lease:
    """A driver's lease on one state directory, from ``take`` to ``release``."""

    def __init__(self, store: StateStore, topology: str, beat: float = BEAT) -> None:
        """``beat``: seconds between two renewals."""
        self.owner = Ownership(topology, this_process())
        self.error: StateError | None = None
        """Set by the thread if another driver has taken over or the directory no longer exists."""
        self._store, self._topology, self._beat = store, topology, beat
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lease", daemon=True)

    def take(self, take_over: bool = False) -> None:
        """Claim the directory and start the thread. Raises ``AlreadyRunning`` if another driver that is alive owns
        the directory.

        With ``take_over`` the directory is not claimed yet. The other driver runs on until this driver is ready
        and makes its first claim.
        """
        self._store.check_owner()
        if not self._store.exclusive:
            log.warning(
                "state store %s may not support exclusive file creation: do not start topology '%s' twice "
                "at the same time",
                self._store.url,
                self._topology,
            )
        if not take_over:
            check_free(self._store, self._topology, _held.__contains__, log.warning)
            self.owner.claim(self._store)
        _held.add(self.owner.token)
        self._thread.start()

    def release(self) -> None:
        """Have the thread release the lease and end, so that the next driver need not wait until the lease
        expires. Only that thread uses the store, so this method waits for at most ``_JOIN_TIMEOUT`` seconds. A
        second call does nothing."""
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join(_JOIN_TIMEOUT)
        _held.discard(self.owner.token)
        if self._thread.is_alive():
            log.warning(
                "topology '%s': the state store %s does not answer, so the lease is not released. "
                "It expires by itself after %g s.",
                self._topology,
                redacted(self._store.url),
                LEASE,
            )

    def _run(self) -> None:
        while not self._ended.wait(self._beat):
            if not self.owner.generation:
                continue  # this driver has not claimed the directory yet
            try:
                self.owner.beat(self._store)
            except (Superseded, StateRemoved) as error:
                self.error = error
                _held.discard(self.owner.token)
                return
            except StateError as error:
                log.warning("the lease could not be renewed: %s", error)
        try:
            self.owner.release(self._store)
        except StateError as error:
            log.warning("the lease could not be released, so the next driver waits until it expires: %s", error)
