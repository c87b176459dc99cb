"""Runs a transactional sink: when its transactions end, what is acked with them, and what happens when the sink
does not take them.

A sink that is away is waited for: the same call is made again after a pause that grows, its inbox fills, and flow
control does the rest. Rows that a sink rejects go to the dead letters; the rest is written. Where a sink does not
say which of the two it is, it counts as away until it takes other rows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from penstock.acking.lineage import Lineage
from penstock.columns import to_values
from penstock.errors import ComponentError, PenstockError, SinkBusy, SinkRefused
from penstock.topology.components import Conf, Failure, Source, TransactionalSink
from penstock.worker.background import TokensToCommit
from penstock.worker.bolts import BoltExecutor
from penstock.worker.failures import USER_ERRORS, blame
from penstock.worker.rejection import Fault, Piece, RowSearch, fault_of, rows_of
from penstock.worker.transaction import Transaction

_PAUSE = 0.01  # s until a sink that is not ready is asked again
_LONGEST_PAUSE = 1.0  # s between two tries of a sink that is away; they begin with _PAUSE and double
_COMMIT_ROWS = 16_384  # rows written before a commit, where that is made whenever nothing waits: one inbox full
_COMMIT_BYTES = 4 << 20  # the same in bytes, for large rows
_HELD_BYTES = (
    64 << 20
)  # of rows that are kept until their commit is done, to offer them again: then it is made now


class SinkExecutor(BoltExecutor[TransactionalSink]):
    """Exactly once a transaction is an epoch. Otherwise the task commits on its own every ``commit_interval``, or
    whenever nothing waits, and acks what was in it."""

    def _open(self, conf: Conf) -> None:
        self._conf = conf
        self._batch: pa.RecordBatch | None = None
        self._writing: RowSearch | None = None
        """The batch that the sink did not take at once."""
        self._joined: list[Lineage] = []
        """Of earlier parcels whose rows are in ``_writing`` too."""
        self._epochs = self.context.delivery == "exactly_once"
        self._unacked: list[Lineage] = []
        self._commits = 0  # the number of the last one of the task's own: its time in milliseconds, or one more
        self.tokens: deque[tuple[int, Any]] = deque()
        """⟨epoch, token⟩ of what is prepared and not known to be committed."""
        self._not_taken = 0
        """Those of them that the commit left out."""
        self._uncommitted = self._uncommitted_bytes = 0
        """Rows written since the last commit, and their bytes."""
        self._held: Piece = []
        """The same rows, other than exactly once: a transaction that is refused is offered again in parts."""
        self._committing: Transaction | None = None
        self._has_written = self._has_committed = False
        """The sink has taken rows in ``write``, and in a commit of its own, since the process began."""
        self._dead: list[tuple[Piece, BaseException]] = []
        """Rejected rows that are not among the dead letters yet."""
        self._prepared_epoch = 0
        self._prepared_rows: deque[tuple[int, int]] = deque()
        """⟨epoch, rows⟩ of what is prepared and not published."""
        self._is_prepared = self._is_recovered = False
        self._inherited: list[Any] = []
        self.wake_at: float | None = None
        """The sink is not asked for anything before that time."""
        self._away_since: float | None = None
        self._unpublished_since: float | None = None
        self._pause_next = _PAUSE
        self._eager = not self._epochs and self.component.commit_interval == 0
        if not self._epochs and not self._eager:
            self.tick_interval = self.component.commit_interval

    def recover(self, tokens: Sequence[Any], epoch: int = 0) -> None:
        """Prepare the sink and let it recover what was prepared for the committed ``epoch``. A sink that is away
        is waited for: until then it takes nothing, and its tokens stay in the manifests."""
        self._inherited = list(tokens)
        self.tokens.extend((epoch, token) for token in tokens)
        self._enter()

    @property
    def may_run(self) -> bool:
        return super().may_run and self.wake_at is None

    @property
    def waits(self) -> bool:
        """The end of an epoch has to wait for the sink."""
        return self._is_recovered and self.wake_at is not None

    def unavailable_for(self, now: float) -> float:
        """Seconds since the sink was last known to take something; 0 while it does. From any thread."""
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
        # A parcel whose rows were all rejected left nothing to commit, and is acked all the same.
        due = self._eager and (self._uncommitted or self._unacked) and (many or not self.busy)
        if due or (self._uncommitted_bytes >= _HELD_BYTES and not self._epochs):
            self._commit()
        return ran

    def wake(self) -> None:
        """The pause is over."""
        self.wake_at = None
        if not self._is_recovered:
            self._enter()
        elif self._committing is not None:
            self._commit_more_too(self._committing)
            self._commit()

    # ---- a sink that is away ---------------------------------------------------------------------------

    def _enter(self) -> None:
        try:
            if not self._is_prepared:
                self.component.prepare(self._conf, self.context)
                self._is_prepared = True
            self.component.recover(self._inherited)
        except USER_ERRORS as error:  # user code may raise anything
            if fault_of(error) is not Fault.AWAY:
                raise blame(self.context.component, "recover", error) from error
            self._wait("recover", error)
            return
        for _ in self._inherited:
            self.tokens.popleft()
        self._is_recovered = True
        self._mark_available()

    def _pause(self, seconds: float) -> None:
        self.wake_at = self._clock.monotonic() + seconds

    def _wait(self, call: str, error: BaseException) -> None:
        """The sink is away: say so once, and ask it again after a longer pause each time."""
        if self._away_since is None:
            self._away_since = self._clock.monotonic()
            self.report(_busy(blame(self.context.component, call, error)))
        self._pause(self._pause_next)
        self._pause_next = min(2 * self._pause_next, _LONGEST_PAUSE)

    def _mark_available(self) -> None:
        self._away_since, self._pause_next = None, _PAUSE

    # ---- rows in ---------------------------------------------------------------------------------------

    def _take(self, batch: pa.RecordBatch) -> None:
        self._batch = batch

    def _work(self) -> int:
        """Write the parcel. None of it counts as done while the sink is away: it is offered again."""
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
            self._unacked += [*self._joined, self._lineage]
        self._batch, self._writing, self._joined = None, None, []
        return self._left

    def _join_next(self, search: RowSearch) -> None:
        """Add the next parcel's rows to a search that is in doubt: whether the sink takes them decides whether it
        is away."""
        if not search.in_doubt or (parcel := self.inbox.take()) is None:
            return
        lineage, left = self._lineage, self._left
        self._end()
        self._begin(parcel)
        search.add([(self._decode(parcel), self._source())])
        self._left += left
        if lineage is not None:
            self._joined.append(lineage)

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
                    self._wait("write", error)
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
        if not self._epochs:
            self._held.append((batch, source))

    def _is_rows_fault(self, call: str, error: BaseException) -> bool:
        """True: look for the rows it is about. False: the sink is away, and is waited for."""
        fault = fault_of(error)
        if fault is Fault.SUPERSEDED:
            raise blame(self.context.component, call, error) from error
        if fault is Fault.AWAY:
            self._wait(call, error)
        return fault is not Fault.AWAY

    def _store_rejected(self) -> bool:
        """Put rejected rows among the dead letters. False: they cannot be kept now; the sink waits for that
        too."""
        rows = [
            (_values(piece), str(blame(self.context.component, "write", error))) for piece, error in self._dead
        ]
        if self.given_up is not None:  # stored before the epoch ends
            for values, text in rows:
                self.given_up.add(values, text, bounded=False)
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
            self._wait("dead letters", error)
            return False
        return True

    # ---- commits of its own ----------------------------------------------------------------------------

    def _tick(self) -> None:
        if not self._epochs and self._committing is None:
            self._commit()

    def _commit(self) -> None:
        """Commit what was written since the last time, other than exactly once. A transaction that is refused is
        offered again in parts: what was committed of it stays so."""
        if not self._is_recovered:
            return
        if self._committing is None:
            self._committing = Transaction(self.component, self._held, self._has_committed, self._next_number)
        transaction = self._committing
        try:
            transaction.run()
        except USER_ERRORS as error:  # the other system may answer with anything
            if fault_of(error) is Fault.SUPERSEDED:  # trying again will not help, starting again may
                refused = blame(self.context.component, "commit", error)
                self._fail_transaction(refused)
                raise refused from error
            self._wait("commit", error)
            return
        finally:
            self._has_committed = transaction.has_taken
        rejected = transaction.take_rejected()
        self._not_taken += len(rejected)
        self._dead += rejected
        if self._dead and not self._store_rejected():
            return
        if self._held or self._batch is None:  # else it may still refuse the batch that it has not taken
            self._mark_available()
        self.stats.written += self._uncommitted - self._not_taken
        unacked = self._begin_anew()
        if self.tracker is not None:
            for lineage in unacked:
                self.tracker.tally.add(lineage.entries())

    def _commit_more_too(self, transaction: Transaction) -> None:
        """As ``_join_next``, for a transaction. A parcel that the sink has not taken yet is the next one: nothing
        is written while a commit waits."""
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
            self._unacked += [*self._joined, self._lineage]
        self._batch, self._writing, self._joined = None, None, []
        self._end()

    def _next_number(self) -> int:
        self._commits = max(int(self._clock.now() * 1000), self._commits + 1)
        return self._commits

    def _fail_transaction(self, error: Exception) -> None:
        unacked = self._begin_anew()
        self.report(error)
        if self.tracker is not None:
            for lineage in unacked:
                self.tracker.fail(lineage.first, lineage.length, str(error))

    def _begin_anew(self) -> list[Lineage]:
        """After a commit, or one that failed for good; gives what was in it."""
        unacked, self._unacked = self._unacked, []
        self._held, self._committing, self._not_taken = [], None, 0
        self._uncommitted = self._uncommitted_bytes = 0
        return unacked

    # ---- exactly once ----------------------------------------------------------------------------------

    def prepare_epoch(self, epoch: int) -> bool:
        """Prepare the epoch's transaction. False while the sink is away: asked again at the next turn. Whatever
        else it raises starts the topology again: the rows would be lost."""
        if not self._is_recovered or self._prepared_epoch == epoch:
            return True  # it took nothing yet; what it has to recover is still among the tokens
        if self.wake_at is not None:
            return False
        try:
            token = self.component.prepare_commit(epoch)
        except USER_ERRORS as error:  # the other system may answer with anything
            if fault_of(error) is Fault.AWAY:
                self._wait("prepare_commit", error)
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
        """What is prepared up to the epoch, for a background job. Nothing while the sink is away with what an
        earlier process prepared: that is published first."""
        tokens = [token for prepared, token in self.tokens if prepared <= epoch] if self._is_recovered else []
        return TokensToCommit(self.context.task, self._commit_token, tokens)

    def _commit_token(self, token: Any) -> None:
        """In the background."""
        self._guard("commit", self.component.commit, token)

    def on_published(self, epoch: int, committed: int, error: PenstockError | None) -> PenstockError | None:
        """So many tokens of ``to_publish`` are committed, and the next one failed with ``error``. Returns why the
        epoch is not published; None: it is. A failure is reported the first time."""
        for _ in range(committed):
            self.tokens.popleft()
        if error is None and self.tokens and self.tokens[0][0] <= epoch:
            where = f"component '{self.context.component}'"
            error = SinkBusy(where, "the sink is away, and has not published what an earlier process prepared")
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
        """Rows that are prepared and not published."""
        return sum(rows for _, rows in self._prepared_rows)

    def commit_and_leave(self) -> None:
        """Another process takes over, other than exactly once: what is committed only in ``close`` would be in
        nobody's counts."""
        self._commit()

    def close(self) -> None:
        if not self._epochs:
            self._commit()
        if self._is_prepared:
            super().close()


def _busy(error: PenstockError) -> SinkBusy:
    """As something that is waited for: it never stops the topology."""
    hint = error.hint or "It is asked again until it takes them; nothing is lost meanwhile."
    return SinkBusy(error.where, error.problem, hint)


def _rejected(component: str, rows: int, error: str) -> ComponentError:
    return ComponentError(
        f"component '{component}'",
        f"the sink rejected {rows} row{'' if rows == 1 else 's'}: {error}",
        "They are among the dead letters: penstock dlq list. All other rows are written.",
    )


def _values(piece: Piece) -> tuple[Any, ...]:
    """A single row's."""
    ((batch, _),) = [(batch, source) for batch, source in piece if batch.num_rows]
    return tuple(to_values(column)[0] for column in batch.columns)
