"""The executor of transactional sinks: it decides when transactions end and what is acked with them, and handles
sinks that refuse rows.

If a sink is unavailable, the executor repeats the same call after a growing pause; its inbox fills, and flow
control slows down the senders. Rows that a sink rejects become dead letters, and all other rows are written. If
the error does not tell which of the two it is, the sink counts as unavailable until it accepts other rows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from penstock.columns import to_values
from penstock.errors import ComponentError, PenstockError, SinkBusy, SinkRefused
from penstock.topology.components import Conf, Failure, Source, TransactionalSink
from penstock.worker.background import TokensToCommit
from penstock.worker.bolts import BoltExecutor
from penstock.worker.failures import USER_ERRORS, blame
from penstock.worker.rejection import Fault, Piece, RowSearch, fault_of, rows_of
from penstock.worker.tracking import Ancestry
from penstock.worker.transaction import Transaction

_PAUSE = 0.01
"""Seconds until a sink that is not ready is asked again, and the first pause after an error: short, because most
sinks are ready again at once."""
_LONGEST_PAUSE = 1.0
"""Longest seconds between two attempts while a sink is unavailable; pauses start with ``_PAUSE`` and double. The
sink continues at most this long after its system is back."""
_COMMIT_ROWS = 16_384
"""Rows after which a sink with ``commit_interval`` 0 commits although more input waits: about one full inbox."""
_COMMIT_BYTES = 4 << 20
"""The same limit in bytes, for large rows."""
_HELD_BYTES = 64 << 20
"""Bytes of rows that are kept in memory until their commit, to offer them again if it is refused. At this limit
the sink commits early."""


class SinkExecutor(BoltExecutor[TransactionalSink]):
    """Runs a ``TransactionalSink``. With exactly-once delivery each epoch is a transaction. Otherwise the task
    commits by itself every ``commit_interval`` seconds, or whenever its inbox is empty if that is 0, and acks
    the rows of the transaction. Used by the worker's loop, except where a method says otherwise."""

    in_batches = True

    def _open(self, conf: Conf) -> None:
        self._conf = conf
        self._batch: pa.RecordBatch | None = None
        self._writing: RowSearch | None = None
        """The search in the current batch, if the sink did not accept it at once."""
        self._joined: list[tuple[Ancestry, int]] = []
        """Lineages and rows of earlier parcels whose rows are in ``_writing`` too."""
        self._exactly_once = self.context.delivery == "exactly_once"
        self._unacked: list[tuple[Ancestry, int]] = []
        self._commits = 0
        """Number of the task's last own transaction: its time in milliseconds, or the previous number plus one."""
        self.tokens: deque[tuple[int, Any]] = deque()
        """⟨Epoch, token⟩ of each transaction that is prepared and not known to be committed."""
        self._not_taken = 0
        """Rows of the open transaction that the sink rejected when it was committed."""
        self._uncommitted = self._uncommitted_bytes = 0
        """Rows and bytes written since the last commit."""
        self._held: Piece = []
        """The same rows, to offer a refused transaction again in parts; empty with exactly-once delivery."""
        self._committing: Transaction | None = None
        self._has_written = self._has_committed = False
        """The sink has accepted rows in ``write``, and in a commit by the task itself, since the process
        started."""
        self._dead: list[tuple[Piece, BaseException]] = []
        """Rejected rows that are not stored as dead letters yet."""
        self._prepared_epoch = 0
        self._prepared_rows: deque[tuple[int, int]] = deque()
        """⟨Epoch, number of rows⟩ of each transaction that is prepared and not published."""
        self._is_prepared = self._is_recovered = False
        self._inherited: list[Any] = []
        self.wake_at: float | None = None
        """The sink is not called before this time (monotonic); None: there is no pause."""
        self._away_since: float | None = None
        self._unpublished_since: float | None = None
        self._pause_next = _PAUSE
        self._eager = not self._exactly_once and self.component.commit_interval == 0
        if not self._exactly_once and not self._eager:
            self.tick_interval = self.component.commit_interval

    def recover(self, tokens: Sequence[Any], epoch: int = 0) -> None:
        """Prepare the sink and let it recover the transactions that were prepared for the committed ``epoch``.
        If the sink is unavailable, ``wake`` tries again; until then the task processes no input, and the tokens
        stay in the manifests."""
        self._inherited = list(tokens)
        self.tokens.extend((epoch, token) for token in tokens)
        self._recover()

    @property
    def may_run(self) -> bool:
        return super().may_run and self.wake_at is None

    @property
    def delays_epoch_end(self) -> bool:
        """True if the end of an epoch has to wait for the sink."""
        return self._is_recovered and self.wake_at is not None

    def unavailable_for(self, now: float) -> float:
        """Seconds for which the sink has been unavailable; 0 if it is available. May be called from any thread."""
        since = [each for each in (self._away_since, self._unpublished_since) if each is not None]
        return max(now - min(since), 1e-9) if since else 0.0

    def run(self) -> bool:
        if self.wake_at is not None:
            return False
        if self.busy and not self.component.ready():
            self._pause(_PAUSE)
            return False
        ran = super().run()
        many = self._uncommitted >= _COMMIT_ROWS or self._uncommitted_bytes >= _COMMIT_BYTES
        # A parcel whose rows were all rejected leaves nothing to commit, but must be acked too.
        due = self._eager and (self._uncommitted or self._unacked) and (many or not self.busy)
        if due or (self._uncommitted_bytes >= _HELD_BYTES and not self._exactly_once):
            self._commit()
        return ran

    def wake(self) -> None:
        """Called when the pause is over: repeats the call that failed, if it was ``recover`` or a commit."""
        self.wake_at = None
        if not self._is_recovered:
            self._recover()
        elif self._committing is not None:
            self._add_next_parcel(self._committing)
            self._commit()

    # ---- an unavailable sink ---------------------------------------------------------------------------

    def _recover(self) -> None:
        try:
            if not self._is_prepared:
                self.component.prepare(self._conf, self.context)
                self._is_prepared = True
            self.component.recover(self._inherited)
        except USER_ERRORS as error:  # user code may raise anything
            if fault_of(error) is not Fault.AWAY:
                raise blame(self.context.component, "recover", error) from error
            self._schedule_retry("recover", error)
            return
        for _ in self._inherited:
            self.tokens.popleft()
        self._is_recovered = True
        self._mark_available()

    def _pause(self, seconds: float) -> None:
        self.wake_at = self._clock.monotonic() + seconds

    def _schedule_retry(self, call: str, error: BaseException) -> None:
        """Called when the sink is unavailable: reports that once, and doubles the pause each time."""
        if self._away_since is None:
            self._away_since = self._clock.monotonic()
            self.report(_busy(blame(self.context.component, call, error)))
        self._pause(self._pause_next)
        self._pause_next = min(2 * self._pause_next, _LONGEST_PAUSE)

    def _mark_available(self) -> None:
        self._away_since, self._pause_next = None, _PAUSE

    # ---- writing rows ----------------------------------------------------------------------------------

    def _take(self, batch: pa.RecordBatch) -> None:
        self._batch = batch

    def _work(self) -> int:
        """Write the parcel. While the sink is unavailable, no row counts as executed and the parcel is offered
        again."""
        assert self._batch is not None
        source = self._source()
        if self._writing is None:
            try:
                self.component.write(self._batch, source)
            except USER_ERRORS as error:  # user code may raise anything
                if not self._is_rows_fault("write", error):
                    return 0
                self._writing = RowSearch([(self._batch, source)], self._has_written)
            else:
                self._hold(self._batch, source)
        if self._writing is not None:
            self._join_next(self._writing)
            if not self._write_in_parts(self._writing):
                return 0
        if self._dead and not self._store_rejected():
            return 0
        if self._away_since is not None:
            self._mark_available()
        if self._lineage is not None:
            self._unacked += [*self._joined, (self._lineage, self._rows_taken)]
        self._batch, self._writing, self._joined = None, None, []
        return self._left

    def _join_next(self, search: RowSearch) -> None:
        """Add the rows of the next parcel to a search that is in doubt: if the sink accepts them, it is
        available."""
        if not search.in_doubt or (parcel := self.inbox.take()) is None:
            return
        lineage, left, rows = self._lineage, self._left, self._rows_taken
        self._end()
        self._begin(parcel)
        search.add([(self._decode(parcel), self._source())])
        self._left += left
        if lineage is not None:
            self._joined.append((lineage, rows))

    def _write_in_parts(self, search: RowSearch) -> bool:
        while search.piece is not None:
            ((batch, source),) = search.piece
            try:
                self.component.write(batch, source)
            except USER_ERRORS as error:  # user code may raise anything
                if not self._is_rows_fault("write", error):
                    search.on_unavailable()
                    return False
                if not search.on_refused(error):
                    self._schedule_retry("write", error)
                    return False
            else:
                search.on_accepted()
                self._hold(batch, source)
        self._dead += search.rejected
        search.rejected = []
        return True

    def _hold(self, batch: pa.RecordBatch, source: Source) -> None:
        self._has_written = True
        self._uncommitted += batch.num_rows
        self._uncommitted_bytes += batch.nbytes
        if not self._exactly_once:
            self._held.append((batch, source))

    def _is_rows_fault(self, call: str, error: BaseException) -> bool:
        """True if the error may be caused by rows, which the caller then searches for. False if the sink is
        unavailable; the task then pauses. Raises if another process has replaced this task."""
        fault = fault_of(error)
        if fault is Fault.SUPERSEDED:
            raise blame(self.context.component, call, error) from error
        if fault is Fault.AWAY:
            self._schedule_retry(call, error)
        return fault is not Fault.AWAY

    def _store_rejected(self) -> bool:
        """Store rejected rows as dead letters. Returns False if that is not possible now; the task then pauses
        as for an unavailable sink."""
        rows = [
            (_values(piece), str(blame(self.context.component, "write", error))) for piece, error in self._dead
        ]
        if self.dead_letters is not None:  # stored before the epoch ends
            for values, text in rows:
                self.dead_letters.add(values, text, bounded=False)
            for text in dict.fromkeys(text for _, text in rows):
                count = sum(each == text for _, each in rows)
                self.report(_rejected(self.context.component, count, text))
            self._dead = []
            return True
        try:
            for error in dict.fromkeys(text for _, text in rows):
                same = [values for values, text in rows if text == error]
                self.context.add_dead_letters(same, Failure(self.context.component, error))
                self._dead = [each for each, row in zip(self._dead, rows, strict=True) if row[1] != error]
                rows = [row for row in rows if row[1] != error]
                self.report(_rejected(self.context.component, len(same), error))
        except (OSError, PenstockError) as error:
            self._schedule_retry("dead letters", error)
            return False
        return True

    # ---- commits by the task itself --------------------------------------------------------------------

    def _tick(self) -> None:
        if not self._exactly_once and self._committing is None:
            self._commit()

    def _commit(self) -> None:
        """Commit the rows written since the last commit. Not used with exactly-once delivery. A refused
        transaction is offered again in parts; parts that are committed already stay committed."""
        if not self._is_recovered:
            return
        if self._committing is None:
            self._committing = Transaction(self.component, self._held, self._has_committed, self._next_number)
        transaction = self._committing
        try:
            transaction.run()
        except USER_ERRORS as error:  # a client library may raise anything
            if fault_of(error) is Fault.SUPERSEDED:  # another attempt will not help, a restart may
                refused = blame(self.context.component, "commit", error)
                self._fail_transaction(refused)
                raise refused from error
            self._schedule_retry("commit", error)
            return
        finally:
            self._has_committed = transaction.has_taken
        rejected = transaction.take_rejected()
        self._not_taken += len(rejected)
        self._dead += rejected
        if self._dead and not self._store_rejected():
            return
        if self._held or self._batch is None:  # otherwise the sink may still refuse the current batch
            self._mark_available()
        self.stats.written += self._uncommitted - self._not_taken
        unacked = self._begin_transaction()
        if self.tracker is not None:
            for lineage, _ in unacked:
                self.tracker.ack(lineage)

    def _add_next_parcel(self, transaction: Transaction) -> None:
        """As ``_join_next``, for a transaction. If the sink has not accepted the current parcel yet, its rows
        are added; nothing is written while a commit waits."""
        if not transaction.wants_more:
            return
        if self._parcel is None:
            if (parcel := self.inbox.take()) is None:
                return
            self._begin(parcel)
            self._batch = self._decode(parcel)
        assert self._batch is not None
        if self._writing is None:
            rows = [(self._batch, self._source())]
        else:
            rows = self._writing.take_rest()
            self._dead += self._writing.rejected
        if rows:
            transaction.add(rows)
        self._uncommitted += rows_of(rows)
        self.stats.executed += self._left
        if self._lineage is not None:
            self._unacked += [*self._joined, (self._lineage, self._rows_taken)]
        self._batch, self._writing, self._joined = None, None, []
        self._end()

    def _next_number(self) -> int:
        self._commits = max(int(self._clock.now() * 1000), self._commits + 1)
        return self._commits

    def _fail_transaction(self, error: Exception) -> None:
        unacked = self._begin_transaction()
        self.report(error)
        if self.tracker is not None:
            for lineage, rows in unacked:
                self.tracker.fail_all(lineage, rows, str(error))
                self.tracker.drop(lineage)

    def _begin_transaction(self) -> list[tuple[Ancestry, int]]:
        """Begin a new transaction, after a commit or a final failure. Returns the lineages of the old one."""
        unacked, self._unacked = self._unacked, []
        self._held, self._committing, self._not_taken = [], None, 0
        self._uncommitted = self._uncommitted_bytes = 0
        return unacked

    # ---- exactly once ----------------------------------------------------------------------------------

    def prepare_epoch(self, epoch: int) -> bool:
        """Prepare the epoch's transaction. Returns False while the sink is unavailable; the worker calls it
        again in its next turn. Raises ``SinkRefused`` for any other error, which restarts the topology, because
        the rows would be lost otherwise."""
        if not self._is_recovered or self._prepared_epoch == epoch:
            return True  # before recovery nothing was written; the inherited tokens are still in ``tokens``
        if self.wake_at is not None:
            return False
        try:
            token = self.component.prepare_commit(epoch)
        except USER_ERRORS as error:  # a client library may raise anything
            if fault_of(error) is Fault.AWAY:
                self._schedule_retry("prepare_commit", error)
                return False
            blamed = blame(self.context.component, "prepare_commit", error)
            raise SinkRefused(blamed.where, blamed.problem, blamed.hint) from error
        self._mark_available()
        self._prepared_epoch = epoch
        self._prepared_rows.append((epoch, self._uncommitted))
        self._uncommitted = self._uncommitted_bytes = 0
        if token is not None:
            self.tokens.append((epoch, token))
        return True

    def to_publish(self, epoch: int) -> TokensToCommit:
        """The tokens prepared up to the epoch, for a background job. Empty until the sink has recovered, because
        the transactions of an earlier process are published first."""
        tokens = [token for prepared, token in self.tokens if prepared <= epoch] if self._is_recovered else []
        return TokensToCommit(self.context.task, self._commit_token, tokens)

    def _commit_token(self, token: Any) -> None:
        """Called on a background thread."""
        self._guard("commit", self.component.commit, token)

    def on_published(self, epoch: int, committed: int, error: PenstockError | None) -> PenstockError | None:
        """Called when a background job has committed the first ``committed`` tokens of ``to_publish``. ``error``
        is that of the next token; None if there was no error. Returns the reason why the epoch is not published;
        None if it is. The first failure is reported."""
        for _ in range(committed):
            self.tokens.popleft()
        if error is None and self.tokens and self.tokens[0][0] <= epoch:
            where = f"component '{self.context.component}'"
            error = SinkBusy(
                where, "the sink is unavailable and has not published what an earlier process prepared"
            )
        if error is not None:
            if self._unpublished_since is None and not isinstance(error, SinkRefused):
                self._unpublished_since = self._clock.monotonic()
                self.report(_busy(error))
            return error
        self._unpublished_since = None
        while self._prepared_rows and self._prepared_rows[0][0] <= epoch:
            self.stats.written += self._prepared_rows.popleft()[1]
        return None

    @property
    def unpublished_rows(self) -> int:
        """Number of rows that are prepared and not published."""
        return sum(rows for _, rows in self._prepared_rows)

    def commit_and_leave(self) -> None:
        """Called before the worker's counters are handed over to another process, unless delivery is
        exactly-once: rows committed later, in ``close``, would not be counted."""
        self._commit()

    def close(self) -> None:
        if not self._exactly_once:
            self._commit()
        if self._is_prepared:
            super().close()


def _busy(error: PenstockError) -> SinkBusy:
    """The error as a ``SinkBusy``, which never stops the topology."""
    hint = error.hint or "The call is repeated until it succeeds; no rows are lost meanwhile."
    return SinkBusy(error.where, error.problem, hint)


def _rejected(component: str, rows: int, error: str) -> ComponentError:
    return ComponentError(
        f"component '{component}'",
        f"the sink rejected {rows} row{'' if rows == 1 else 's'}: {error}",
        "They are among the dead letters: penstock dlq list. All other rows are written.",
    )


def _values(piece: Piece) -> tuple[Any, ...]:
    """The values of a piece of one row."""
    ((batch, _),) = [(batch, source) for batch, source in piece if batch.num_rows]
    return tuple(to_values(column)[0] for column in batch.columns)
