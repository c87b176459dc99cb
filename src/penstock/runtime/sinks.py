"""Runs a transactional sink: when its transactions end, and what is acked with them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from penstock.acking.lineage import Lineage
from penstock.errors import SinkBusy, SinkRefused
from penstock.runtime.bolts import BoltExecutor
from penstock.runtime.failures import blame
from penstock.topology.components import Conf, TransactionalSink

_PAUSE = 0.01  # s until a sink that takes nothing is asked again
_COMMIT_ROWS = 16_384  # rows written before a commit, where that is made whenever nothing waits: one inbox full
_COMMIT_BYTES = 4 << 20  # the same in bytes, for large rows


class SinkExecutor(BoltExecutor[TransactionalSink]):
    """Exactly once a transaction is an epoch. Otherwise the task commits on its own every ``commit_interval``, or
    whenever nothing waits, and acks what was in it."""

    def _open(self, conf: Conf) -> None:
        self._batch: pa.RecordBatch | None = None
        self._epochs = self.context.delivery == "exactly_once"
        self._unacked: list[Lineage] = []
        self._commits = 0  # the number of the last one of the task's own: its time in milliseconds, or one more
        self.tokens: deque[tuple[int, Any]] = deque()
        """⟨epoch, token⟩ of what is prepared and not known to be committed."""
        self._uncommitted = self._uncommitted_bytes = 0
        """Rows written since the last commit, and their bytes."""
        self._refused = False
        """The last commit was refused for the moment."""
        self._paused = False
        self._next_commit: float | None = None
        self._eager = not self._epochs and self.component.commit_interval == 0
        if not self._epochs and not self._eager:
            self.tick_interval = self.component.commit_interval
        self._guard("prepare", self.component.prepare, conf, self.context)

    def recover(self, tokens: Sequence[Any]) -> None:
        self._guard("recover", self.component.recover, tokens)

    @property
    def may_run(self) -> bool:
        return super().may_run and not self._paused

    def run(self) -> bool:
        if self._paused:
            return False
        if self.busy and not self.component.ready():
            self._pause()
            return False
        ran = super().run()
        many = self._uncommitted >= _COMMIT_ROWS or self._uncommitted_bytes >= _COMMIT_BYTES
        if self._eager and self._uncommitted and (many or not self.busy):
            self._commit()
        return ran

    def tick(self) -> None:
        if self._paused:
            self._paused, self.next_tick = False, self._next_commit
            if self._refused:
                self._commit()
        if self.next_tick is not None and self.next_tick <= self._clock.monotonic():
            super().tick()

    def _pause(self) -> None:
        """The sink said no: take nothing and ask nothing for a moment."""
        self._paused, self._next_commit = True, self.next_tick
        self.next_tick = self._clock.monotonic() + _PAUSE

    def _take(self, batch: pa.RecordBatch) -> None:
        self._batch = batch

    def _work(self) -> int:
        try:
            self.component.write(self._batch, self._source())
        except Exception as error:  # user code may raise anything
            blamed = blame(self.context.component, "write", error)
            if self._epochs:  # a batch left out would be lost in silence
                raise SinkRefused(blamed.where, blamed.rule, blamed.got, blamed.way_out) from error
            self.report(blamed)
            self._fail_all(blamed)
        if self._lineage is not None:
            self._unacked.append(self._lineage)
        self._uncommitted += self._left
        self._uncommitted_bytes += 0 if self._batch is None else self._batch.nbytes
        self._batch = None
        return self._left

    def _tick(self) -> None:
        if not self._epochs:
            self._commit()

    def _commit(self) -> None:
        """Commit what was written since the last time, other than exactly once."""
        try:
            self._commits = max(int(self._clock.now() * 1000), self._commits + 1)
            token = self.component.prepare_commit(self._commits)
            if token is not None:
                self.component.commit(token)
        except SinkBusy as error:
            if not self._refused:  # once, however long it lasts
                self.report(blame(self.context.component, "commit", error))
            self._refused = True
            self._pause()
            return
        except Exception as error:  # the other system may answer with anything
            unacked = self._begin_anew()
            blamed = blame(self.context.component, "commit", error)
            self.report(blamed)
            if self.tracker is not None:
                for lineage in unacked:
                    self.tracker.fail(lineage.first, lineage.length, str(blamed))
            if isinstance(blamed, SinkRefused):  # trying again will not help, starting again may
                raise blamed from error
            return
        unacked = self._begin_anew()
        if self.tracker is not None:
            for lineage in unacked:
                self.tracker.tally.add(lineage.entries())

    def _begin_anew(self) -> list[Lineage]:
        """After a commit, or one that failed for good; gives what was in it."""
        unacked, self._unacked = self._unacked, []
        self._uncommitted = self._uncommitted_bytes = 0
        self._refused = False
        return unacked

    def epoch_ends(self, epoch: int) -> None:
        """Prepare the epoch's transaction. What it raises starts the topology again: the rows would be lost."""
        try:
            token = self.component.prepare_commit(epoch)
        except Exception as error:  # the other system may answer with anything
            blamed = blame(self.context.component, "prepare_commit", error)
            raise SinkRefused(blamed.where, blamed.rule, blamed.got, blamed.way_out) from error
        if token is not None:
            self.tokens.append((epoch, token))

    def publish(self, epoch: int) -> None:
        """Commit all up to the epoch. Called from the thread that writes snapshots. What raises can be tried
        again."""
        while self.tokens and self.tokens[0][0] <= epoch:
            self._guard("commit", self.component.commit, self.tokens[0][1])
            self.tokens.popleft()

    def close(self) -> None:
        if not self._epochs:
            self._commit()
        super().close()
