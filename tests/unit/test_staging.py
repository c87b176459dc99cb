"""Staging: rows of several sources under one schema, parts on disk, tokens, crashes."""

from __future__ import annotations

import hashlib
import json
import pickle
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from penstock.columns import to_column
from penstock.errors import ComponentError, StateError
from penstock.storage import staging
from penstock.storage.staging import RowBuffer, StagedSink
from penstock.topology.components import Conf, Context, Source

A, B = Source("left", "default", 3), Source("right", "odd", 4)


class Shelf:
    """An outside system: the published rows, and the newest epoch of each ⟨task, identity⟩."""

    def __init__(self) -> None:
        self.rows: list[Any] = []
        self.epochs: dict[tuple[str, str], int] = {}
        self.down = False


class ShelfSink(StagedSink):
    def __init__(self, shelf: Shelf) -> None:
        self.shelf = shelf

    def connect(self, conf: Conf, context: Context) -> None:
        self.key = (context.component, self.identity)

    def published(self) -> int:
        return self.shelf.epochs.get(self.key, -1)

    def publish(self, epoch: int, rows: pa.Table) -> None:
        if self.shelf.down:
            raise ConnectionError("down")
        self.shelf.rows += rows.to_pylist()
        self.shelf.epochs[self.key] = epoch


def start(shelf: Shelf, folder: Path | str, *tokens: Any) -> ShelfSink:
    sink = ShelfSink(shelf)
    sink.prepare({}, Context("t", "sink", 1, 0, {"sink": (1,)}, folder=str(folder), delivery="exactly_once"))
    sink.recover(tokens)
    return sink


def batch(**columns: Any) -> pa.RecordBatch:
    return pa.record_batch({name: pa.array(values) for name, values in columns.items()})


def pickled(**columns: Any) -> pa.RecordBatch:
    """A batch as an untyped field with values of several types arrives."""
    return pa.record_batch({name: to_column(values, None) for name, values in columns.items()})


def staged(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "staged").glob("*"))


def test_a_token_is_json_and_names_what_is_on_disk(tmp_path: Path) -> None:
    shelf = Shelf()
    sink = start(shelf, tmp_path)
    sink.write(batch(n=[1, 2]), A)
    sink.write(batch(n=[3]), B)
    token = sink.prepare_commit(7)
    data = [(tmp_path / "staged" / name).read_bytes() for name in staged(tmp_path)]
    digests = [hashlib.blake2b(part, digest_size=32).hexdigest() for part in data]
    assert token == {"epoch": 7, "files": staged(tmp_path), "digests": digests, "rows": 3}
    assert json.loads(json.dumps(token)) == token
    assert len(staged(tmp_path)) == 1
    sink.commit(token)
    assert shelf.rows == [{"n": 1}, {"n": 2}, {"n": 3}]
    assert staged(tmp_path) == []


def test_rows_go_to_disk_in_parts_before_the_epoch_ends(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(staging, "PART_BYTES", 800)
    shelf = Shelf()
    sink = start(shelf, tmp_path)
    for n in range(0, 1000, 50):  # 400 bytes each: two batches make a part
        sink.write(batch(n=range(n, n + 50)), A)
        assert sink._buffer.bytes <= 800
    assert len(staged(tmp_path)) == 9
    token = sink.prepare_commit(1)
    assert (len(token["files"]), token["rows"]) == (10, 1000)
    sink.commit(token)
    assert [row["n"] for row in shelf.rows] == list(range(1000))
    assert staged(tmp_path) == []


def test_parts_of_an_epoch_may_differ_in_what_a_field_was_taken_for(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(staging, "PART_BYTES", 1)
    shelf = Shelf()
    sink = start(shelf, tmp_path)
    for values in ([None], [1], [0.5]):
        sink.write(batch(n=values), A)
    sink.commit(sink.prepare_commit(1))
    assert shelf.rows == [{"n": None}, {"n": 1.0}, {"n": 0.5}]


def test_recovery_drops_what_no_token_names_and_what_was_half_written(tmp_path: Path) -> None:
    shelf = Shelf()
    sink = start(shelf, tmp_path)
    sink.write(batch(n=[1]), A)
    sink.prepare_commit(1)
    (tmp_path / "staged" / ".tmp-x").write_bytes(b"half")
    (tmp_path / "other").write_bytes(b"the task's own")
    start(shelf, tmp_path)
    assert staged(tmp_path) == []
    assert (tmp_path / "other").exists()
    assert shelf.rows == []


def test_the_identity_stays_with_the_folder(tmp_path: Path) -> None:
    shelf = Shelf()
    first, again = start(shelf, tmp_path / "a"), start(shelf, tmp_path / "a")
    assert first.identity == again.identity
    assert first.identity != start(shelf, tmp_path / "b").identity
    assert start(shelf, "").identity != start(shelf, "").identity


def test_without_a_folder_the_temporary_one_goes_in_the_end(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    shelf = Shelf()
    sink = start(shelf, "")
    sink.write(batch(n=[1]), A)
    sink.commit(sink.prepare_commit(1))
    assert list(tmp_path.iterdir()) != []
    sink.cleanup()
    assert list(tmp_path.iterdir()) == []
    assert shelf.rows == [{"n": 1}]


def test_the_folder_may_be_a_url() -> None:
    shelf = Shelf()
    url = "memory://penstock-test-staging/task"
    sink = start(shelf, url)
    sink.write(batch(n=[1]), A)
    token = sink.prepare_commit(1)
    sink.write(batch(n=[2]), A)
    sink.prepare_commit(2)
    again = start(shelf, url, token)
    assert shelf.rows == [{"n": 1}]
    assert again.identity == sink.identity
    assert again._staged.list() == []


def test_an_epoch_given_up_leaves_no_files_behind(tmp_path: Path) -> None:
    """With at-least-once delivery the runtime does not repeat a commit that failed: its tuples are replayed."""
    shelf = Shelf()
    sink = start(shelf, tmp_path)
    sink.write(batch(n=[1]), A)
    shelf.down = True
    token = sink.prepare_commit(1)
    with pytest.raises(ConnectionError):
        sink.commit(token)
    shelf.down = False
    sink.write(batch(n=[2]), A)
    sink.commit(sink.prepare_commit(2))
    assert shelf.rows == [{"n": 2}]
    assert staged(tmp_path) == []


def test_a_disk_that_refuses_once_costs_no_row(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(staging, "PART_BYTES", 8)
    shelf = Shelf()
    sink = start(shelf, tmp_path)
    sink.write(batch(n=[1]), A)
    write = sink._staged.write

    def refuse(name: str, data: bytes) -> None:
        raise StateError("state store", "the file cannot be written (no space left)")

    monkeypatch.setattr(sink._staged, "write", refuse)
    with pytest.raises(StateError):
        sink.write(batch(n=[2]), A)  # this batch fails, the one before is kept
    monkeypatch.setattr(sink._staged, "write", write)
    sink.write(batch(n=[3]), A)
    sink.commit(sink.prepare_commit(1))
    assert shelf.rows == [{"n": 1}, {"n": 3}]


def test_staged_rows_that_vanished_are_an_error_not_a_loss(tmp_path: Path) -> None:
    shelf = Shelf()
    sink = start(shelf, tmp_path)
    sink.write(batch(n=[1]), A)
    token = sink.prepare_commit(1)
    for path in (tmp_path / "staged").iterdir():
        path.unlink()
    with pytest.raises(ComponentError) as caught:
        start(shelf, tmp_path, token)
    message = str(caught.value)
    assert message.startswith(
        "component 'sink' (task 1): the staged rows of epoch 1 were lost before they were published"
    )
    assert token["files"][0] in message
    assert "All nodes must reach the same delivery.state_dir" in message


def test_staged_rows_that_somebody_changed_are_not_published(tmp_path: Path) -> None:
    shelf = Shelf()
    sink = start(shelf, tmp_path)
    sink.write(batch(n=[1]), A)
    token = sink.prepare_commit(1)
    [path] = (tmp_path / "staged").iterdir()
    other = pa.table({"n": [2]})
    with pa.ipc.new_file(str(path), other.schema) as writer:
        writer.write_table(other)
    with pytest.raises(ComponentError) as caught:
        start(shelf, tmp_path, token)
    message = str(caught.value)
    assert f"{path} was changed after it was written" in message
    assert "nothing else may change or remove files in it" in message
    assert shelf.rows == []


def test_a_sink_is_pickled_before_it_is_prepared() -> None:
    assert isinstance(pickle.loads(pickle.dumps(ShelfSink(Shelf()))), ShelfSink)


def test_fields_may_come_in_another_order() -> None:
    buffer = RowBuffer("here")
    buffer.add(batch(word=["a"], n=[1]), A)
    buffer.add(batch(n=[2], word=["b"]), B)
    assert buffer.table().to_pylist() == [{"word": "a", "n": 1}, {"word": "b", "n": 2}]


def test_other_fields_are_refused_and_the_rest_stays() -> None:
    buffer = RowBuffer("component 'sink' (task 1)")
    buffer.add(batch(word=["a"], n=[1]), A)
    with pytest.raises(ComponentError) as caught:
        buffer.add(batch(word=["b"], count=[2]), B)
    assert str(caught.value) == (
        "component 'sink' (task 1), input from 'right' (stream 'odd', task 4): it has the fields"
        " (word, count), but other inputs of the sink have (word, n)."
        " Give each kind of row a sink of its own, or rename the fields in a bolt before it."
    )
    assert buffer.table().to_pylist() == [{"word": "a", "n": 1}]


def test_types_widen_where_no_value_changes() -> None:
    buffer = RowBuffer("here")
    for values in ([None], [1], [2.5], [None]):
        buffer.add(batch(n=values), A)
    assert buffer.table()["n"].to_pylist() == [None, 1.0, 2.5, None]
    buffer.clear()
    buffer.add(batch(n=[4]), A)
    assert buffer.table().schema.field("n").type == pa.float64()


@pytest.mark.parametrize("values", [["text"], [2**60 + 1]])
def test_types_that_would_change_a_value_are_refused(values: list[Any]) -> None:
    buffer = RowBuffer("component 'sink' (task 1)")
    buffer.add(batch(n=[0.5]), A)
    with pytest.raises(
        ComponentError, match=r"its fields have other types than before .* instead of \(n: double\)"
    ) as caught:
        buffer.add(batch(n=values), B)
    assert "Declare the fields' types where they are emitted" in str(caught.value)
    assert buffer.table()["n"].to_pylist() == [0.5]


def test_a_large_integer_is_not_rounded_for_a_fraction_after_it() -> None:
    buffer = RowBuffer("here")
    buffer.add(batch(n=[2**60 + 1]), A)
    with pytest.raises(ComponentError, match="its fields have other types than before"):
        buffer.add(batch(n=[0.5]), A)
    buffer.add(batch(n=[1]), A)
    assert buffer.table()["n"].to_pylist() == [2**60 + 1, 1]


def test_pickled_values_become_plain_where_arrow_knows_them() -> None:
    buffer = RowBuffer("here")
    buffer.add(pickled(n=[1, 2.5], d=[{"a": [1]}, None]), A)
    assert buffer.table().to_pylist() == [{"n": 1.0, "d": {"a": [1]}}, {"n": 2.5, "d": None}]


def test_pickled_values_arrow_does_not_know_are_refused() -> None:
    buffer = RowBuffer("component 'sink' (task 1)")
    with pytest.raises(ComponentError) as caught:
        buffer.add(pickled(n=[1, "one"]), A)
    message = str(caught.value)
    assert message.startswith(
        "component 'sink' (task 1), field 'n' from 'left' (stream 'default', task 3): its values"
    )
    assert ": int, str (" in message
    assert "Declare the field with a type, or convert it in a bolt before the sink." in message
    assert buffer.rows == 0
