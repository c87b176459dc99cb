"""Puts the results of one task of a ``PersistBolt`` into its queue."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

import pyarrow as pa

from penstock.errors import ComponentError, SinkBusy, SinkRefused
from penstock.persist.entries import pack, split
from penstock.persist.policy import Patience
from penstock.persist.queues import ENTRY_BYTES, PersistentQueue, QueueClient, QueueUnavailable, WriterSuperseded

_PUT_ENTRIES = 8  # entries per call of put: at most 4 MB


class QueueWriter:
    """One writer of a queue. Called by the task's thread."""

    def __init__(
        self,
        name: str,
        queue: PersistentQueue,
        client: QueueClient,
        where: str,
        report: Callable[[Exception], None],
    ) -> None:
        """``name`` identifies the writer in the queue. ``report`` is called once per outage of the queue."""
        self.name, self.client = name, client
        self._queue, self._where, self._report = queue, where, report
        self.incarnation: int | None = None
        """None until the queue has answered for the first time."""
        self.room = 0
        """Bytes that this writer may put before it asks the queue again."""
        self._number = 0
        self._packed: list[bytes] = []
        self._patience = Patience()
        # At once if possible: the incarnation of a worker that replaces this one must be later.
        with contextlib.suppress(QueueUnavailable):
            self.incarnation = client.register(name)

    def update_room(self, reserved: int, writers: int) -> None:
        """Ask the queue for its free space, less ``reserved`` bytes, and set ``room`` to this writer's share.
        ``room`` is 0 while the queue does not answer. The pauses between two attempts increase, because an attempt
        without an answer blocks the worker."""
        self.room = 0
        now = time.monotonic()
        if self._patience.wait(now):
            return
        try:
            if self.incarnation is None:
                self.incarnation = self.client.register(self.name)
            free = self._queue.max_bytes - self.client.waiting() - reserved
        except QueueUnavailable as error:
            if not self._patience.attempts:
                self._report(error)
            self._patience.failed(now)
            return
        self._patience.succeeded()
        self.room = max(0, free) // writers

    @property
    def has_packed(self) -> bool:
        """True if entries are packed and not yet in the queue."""
        return bool(self._packed)

    def pack(self, rows: pa.Table) -> None:
        """Turn rows into entries, to be put by ``put_packed``. The writer must be registered."""
        assert self.incarnation is not None
        for part in split(rows, ENTRY_BYTES):
            self._number += 1
            self._packed.append(pack(self.name, self.incarnation, self._number, part))

    def put_packed(self) -> None:
        """Put the packed entries, a few at a time. Raises ``SinkBusy`` if the queue does not answer; the next call
        puts the remaining entries with the same numbers, so the processor recognises duplicates."""
        if self._packed and self._patience.wait(time.monotonic()):
            raise SinkBusy(self._where, f"the queue {self._queue} did not answer the last request")
        while self._packed:
            try:
                self.client.put(self._packed[:_PUT_ENTRIES], self.name, self.incarnation or 0)
            except QueueUnavailable as error:
                self._patience.failed(time.monotonic())
                raise SinkBusy(error.where, error.problem, error.hint) from error
            except WriterSuperseded as error:
                raise SinkRefused(error.where, error.problem, error.hint) from error
            except ComponentError:
                self._packed = []  # the queue will never accept them: their tuples fail, the next ones need not
                raise
            self.room -= sum(map(len, self._packed[:_PUT_ENTRIES]))
            del self._packed[:_PUT_ENTRIES]
        self._patience.succeeded()
