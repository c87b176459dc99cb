"""Base class of sinks that stage the rows of an epoch in files and publish them in one transaction elsewhere.

A subclass implements ``connect``, ``published`` and ``publish``. This module does the rest: staging, commit
tokens, idempotence, and cleaning up after a crash.
"""

from __future__ import annotations

import hashlib
import tempfile
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from penstock.columns import is_pickled, to_values
from penstock.errors import ComponentError, SinkRefused, StateError
from penstock.state.store import StateStore, is_missing
from penstock.storage import incarnation
from penstock.topology.components import Conf, Context, Source, TransactionalSink

PART_BYTES = 32 << 20  # bytes of rows in memory before they are written to disk: large writes, and little memory
_STAGED = "staged"


class RowBuffer:
    """Batches from several sources, converted to one schema. The first batch determines the fields and their
    order.

    The type of an undeclared field may differ between batches. It is widened if no value changes (null to any
    type, integer to float) and rejected otherwise.
    """

    def __init__(self, where: str) -> None:
        self._where = where
        self._batches: list[pa.RecordBatch] = []
        self.schema: pa.Schema | None = None
        self.rows = 0
        self.bytes = 0

    def add(self, batch: pa.RecordBatch, source: Source) -> None:
        """Add a batch, or raise ``ComponentError`` and leave the buffer unchanged."""
        if batch.num_rows == 0:
            return
        batch = self.plain(batch, source)
        if self.schema is None:
            self.schema = batch.schema
        elif batch.schema != self.schema:
            batch = self._fit(batch, source)
        self._batches.append(batch)
        self.rows += batch.num_rows
        self.bytes += batch.nbytes

    def plain(self, batch: pa.RecordBatch, source: Source) -> pa.RecordBatch:
        """The batch without pickled columns and metadata, which an outside system cannot read."""
        columns = []
        for name, column in zip(batch.schema.names, batch.columns, strict=True):
            if is_pickled(column):
                values = to_values(column)
                try:
                    column = pa.array(values)
                except (pa.ArrowException, TypeError, OverflowError) as error:
                    kinds = sorted({type(value).__name__ for value in values})
                    raise ComponentError(
                        f"{self._where}, field '{name}' from {_name(source)}",
                        f"its values have no common type that Arrow knows: {', '.join(kinds)} ({error})",
                        "Declare the field with a type, or convert it in a bolt before the sink.",
                    ) from error
            columns.append(column)
        return pa.record_batch(columns, names=batch.schema.names)

    def table(self) -> pa.Table:
        """All rows added since the last ``clear``."""
        return pa.Table.from_batches(self._batches, self.schema)

    def clear(self) -> None:
        self._batches, self.rows, self.bytes = [], 0, 0

    def _fit(self, batch: pa.RecordBatch, source: Source) -> pa.RecordBatch:
        """The batch cast to the buffer's schema. Widens the schema and the buffered batches if necessary."""
        assert self.schema is not None
        names = self.schema.names
        if sorted(batch.schema.names) != sorted(names):
            raise ComponentError(
                f"{self._where}, input from {_name(source)}",
                f"it has the fields ({', '.join(batch.schema.names)}), but other inputs of the "
                f"sink have ({', '.join(names)})",
                "Give each kind of row a sink of its own, or rename the fields in a bolt before it.",
            )
        batch = batch.select(names)
        try:
            schema = pa.unify_schemas([self.schema, batch.schema], promote_options="permissive")
            fitting = batch.cast(schema)
            if schema != self.schema:
                self._batches = [earlier.cast(schema) for earlier in self._batches]
                self.schema = schema
        except pa.ArrowException as error:
            raise ComponentError(
                f"{self._where}, input from {_name(source)}",
                f"its fields have other types than before ({error}): ({_types(batch.schema)}) "
                f"instead of ({_types(self.schema)})",
                "Declare the fields' types where they are emitted, or convert them in a bolt before the sink.",
            ) from error
        return fitting


class StagedSink(TransactionalSink):
    """A transactional sink that keeps rows in its task's folder until their epoch is committed.

    The commit of an epoch takes three steps: (1) ask the outside system for the newest epoch it has recorded for
    this task, and continue with step 3 if it is this one or a later one; (2) publish the rows and the epoch number
    in one transaction; (3) remove the staged files. After a crash between two steps ``recover`` repeats them.
    ``commit`` may run on a separate thread: ``published`` and ``publish`` share no data with ``write``.

    The outside system must record ``identity`` together with the epoch, and must compare epochs only under one
    identity. A topology that starts from scratch counts epochs from 1 again, under a new identity. With a delivery
    other than exactly once, each process numbers its own commits under its own identity. Rows are staged in parts
    of about 32 MB, but an epoch is published as one table, which must fit in memory.
    """

    context: Context
    identity: str
    """The namespace of the commit numbers. With exactly-once delivery it belongs to the task since its first run
    and is stored in ``context.folder``; otherwise it belongs to this process."""

    @abstractmethod
    def connect(self, conf: Conf, context: Context) -> None:
        """Called once by ``prepare``, after ``self.identity`` is set."""

    @abstractmethod
    def published(self) -> int:
        """The newest epoch that the outside system has recorded for this task and ``self.identity``; -1 if
        none."""

    @abstractmethod
    def publish(self, epoch: int, rows: pa.Table) -> None:
        """Write the rows and record the epoch in one transaction."""

    def dead_letters_name(self, epoch: int) -> str:
        """The name under which ``context.add_dead_letters`` stores the dead letters of an attempt to publish the
        epoch. The next attempt replaces them. Under one identity no other epoch has that number."""
        return f"{self.identity}.published.{epoch}"

    def prepare(self, conf: Conf, context: Context) -> None:
        self.context = context
        self.where = f"component '{context.component}' (task {context.task})"
        # Without a folder nothing survives the process, so a temporary directory is sufficient.
        self._scratch = None if context.folder else tempfile.TemporaryDirectory(prefix="penstock-sink-")
        self._store = StateStore(self._scratch.name if self._scratch else context.folder)
        self._staged = self._store.child(_STAGED)
        self.incarnation = incarnation.begin(context, self._store if context.folder else None, self.where)
        self.identity = self.incarnation.identity
        self._buffer = RowBuffer(self.where)
        self._parts: list[str] = []
        self._digests: list[str] = []
        self._rows = 0
        self._part_number = 0
        self._newest = -1
        self._prepared: dict[int, list[str]] = {}
        self.connect(conf, context)

    def recover(self, tokens: Sequence[Any]) -> None:
        for token in sorted(filter(None, tokens), key=lambda token: int(token["epoch"])):
            self.commit(token)
            self._newest = max(self._newest, token["epoch"])
        may_remove = self.incarnation.may_remove
        for name in filter(may_remove, self._staged.list()):
            self._staged.remove(name)
        self._store.sweep(_STAGED, may_remove)
        self._newest = max(self._newest, self.published())

    def write(self, batch: pa.RecordBatch, source: Source) -> None:
        """Raises only because of this batch, which is then not included. Earlier batches stay in the epoch."""
        if self._buffer.bytes >= PART_BYTES:
            self._spill()
        self._buffer.add(batch, source)

    def prepare_commit(self, epoch: int) -> Any:
        if self._buffer.rows:
            self._spill()
        if not self._parts:
            return None
        # After a fallback to an earlier epoch its number is used again: stay above what was published.
        self._newest = max(epoch, self._newest + 1)
        # With exactly-once delivery the token, and with it the digests, is stored in the signed manifest.
        token = {"epoch": self._newest, "files": self._parts, "digests": self._digests, "rows": self._rows}
        self._prepared[self._newest] = self._parts
        self._parts, self._digests, self._rows = [], [], 0
        return token

    def commit(self, token: Any) -> None:
        if token is None:
            return
        if self.published() < token["epoch"]:
            self.publish(token["epoch"], self._read(token))
        # Epochs commit in order: an earlier one that could not be committed never will be.
        done = [epoch for epoch in list(self._prepared) if epoch <= token["epoch"]]
        for name in {*token["files"], *(name for epoch in done for name in self._prepared.pop(epoch))}:
            self._staged.remove(name)

    def cleanup(self) -> None:
        if self._scratch is not None:
            self._scratch.cleanup()

    def _spill(self) -> None:
        """Write the rows in memory to a file, as one part of the open epoch. If it raises, the rows stay in
        memory."""
        table = self._buffer.table()
        out = pa.BufferOutputStream()
        with pa.ipc.new_file(out, table.schema) as writer:
            writer.write_table(table.combine_chunks())
        name = f"{self.incarnation.prefix}-{self._part_number}.arrow"
        data = out.getvalue().to_pybytes()
        self._staged.write(name, data)
        self._parts.append(name)
        self._digests.append(_digest(data))
        self._part_number += 1
        self._rows += table.num_rows
        self._buffer.clear()

    def _read(self, token: Any) -> pa.Table:
        try:
            data = [self._staged.read(name) for name in token["files"]]
        except StateError as error:
            if not is_missing(error):
                raise
            raise self._staged_rows_lost(token, f"{error.where} does not exist") from error
        for name, part, digest in zip(token["files"], data, token["digests"], strict=True):
            if _digest(part) != digest:
                raise self._staged_rows_lost(token, f"{self._staged.url}/{name} was changed after it was written")
        tables = [pa.ipc.open_file(pa.py_buffer(part)).read_all() for part in data]
        try:
            return pa.concat_tables(tables, promote_options="permissive")
        except pa.ArrowException as error:
            raise ComponentError(
                self.where,
                f"the parts of epoch {token['epoch']} have different schemas ({error}): "
                f"{'; '.join(_types(table.schema) for table in tables)}",
                "Declare the fields' types where they are emitted.",
            ) from error

    def _staged_rows_lost(self, token: Any, why: str) -> ComponentError:
        return (SinkRefused if self.incarnation.epochs else ComponentError)(
            self.where,
            f"the staged rows of epoch {token['epoch']} were lost before they were published: {why}",
            (
                "All nodes must reach the same delivery.state_dir, and nothing else may change or "
                "remove files in it."
            ),
        )


def _digest(part: bytes) -> str:
    return hashlib.blake2b(part, digest_size=32).hexdigest()


def _name(source: Source) -> str:
    return f"'{source.component}' (stream '{source.stream}', task {source.task})"


def _types(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name}: {field.type}" for field in schema)
