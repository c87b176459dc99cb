"""ParquetSink: visible files, names, partitions, widened types, other file systems, rejected input."""

from __future__ import annotations

import datetime
import errno
import os
import shutil
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq
import pytest

from penstock import Delivery, Settings, Spout, TopologyBuilder
from penstock.connectors import parquet, parquet_files
from penstock.connectors.parquet import ParquetSink
from penstock.errors import ComponentError, SinkBusy, SinkRefused, TopologyError
from penstock.replay.state_dead_letters import FOLDER, StateDeadLetterStore
from penstock.state.store import StateStore
from penstock.testing import LocalRunner
from penstock.topology.components import Context, Source

SOURCE = Source("words", "default", 7)


def start(sink: ParquetSink, state: Path | str = "", *tokens: Any) -> ParquetSink:
    sink.prepare({}, Context("t", "sink", 1, 0, {"sink": (1,)}, folder=str(state), delivery="exactly_once"))
    sink.recover(tokens)
    return sink


def write(sink: ParquetSink, **columns: Any) -> None:
    sink.write(pa.record_batch({name: pa.array(values) for name, values in columns.items()}), SOURCE)


def committed(sink: ParquetSink, epoch: int, **columns: Any) -> None:
    write(sink, **columns)
    sink.commit(sink.prepare_commit(epoch))


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*.parquet"))


def staged(folder: Path) -> list[str]:
    return [path.name for path in folder.rglob("*.staged")]


def test_files_are_named_after_task_run_and_epoch_and_sort_by_epoch(tmp_path: Path) -> None:
    sink = start(ParquetSink(tmp_path / "out"), tmp_path / "state")
    for epoch in (9, 10, 111):
        committed(sink, epoch, n=[epoch])
    names = files(tmp_path / "out")
    task, process = sink.incarnation.task, sink.incarnation.process
    assert names == [f"t-sink-0-{task}-{epoch:015d}-{process}-0.parquet" for epoch in (9, 10, 111)]
    assert pq.read_table(tmp_path / "out" / names[0]).to_pylist() == [{"n": 9}]


def test_readers_pass_over_what_is_staged_also_in_mid_write(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(parquet, "ROW_GROUP_BYTES", 1)
    sink = start(ParquetSink(tmp_path))
    committed(sink, 1, n=[1])
    write(sink, n=[2])
    write(sink, n=[3])  # row 2 is in the staged file, which has no footer yet
    assert len(staged(tmp_path)) == 1
    dataset = pyarrow.dataset.dataset(tmp_path)
    assert dataset.to_table()["n"].to_pylist() == [1]
    sink.prepare_commit(2)
    assert pyarrow.dataset.dataset(tmp_path).to_table()["n"].to_pylist() == [1]
    assert len(files(tmp_path)) == 1  # a recursive search for *.parquet does not find it either


def test_rows_become_row_groups_as_they_come(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(parquet, "ROW_GROUP_BYTES", 800)
    sink = start(ParquetSink(tmp_path))
    for n in range(0, 1000, 50):
        write(sink, n=range(n, n + 50))
        assert sink._buffer.bytes <= 800
    token = sink.prepare_commit(1)
    assert token["rows"] == 1000
    sink.commit(token)
    (name,) = files(tmp_path)
    assert pq.ParquetFile(tmp_path / name).num_row_groups == 10
    assert pq.read_table(tmp_path / name)["n"].to_pylist() == list(range(1000))
    assert pq.ParquetFile(tmp_path / name).metadata.row_group(0).column(0).compression == "ZSTD"


def test_partitions_become_folders_that_readers_know(tmp_path: Path) -> None:
    sink = start(ParquetSink(tmp_path, partition_by=["day", "word"]))
    day = datetime.date(2024, 2, 29)
    committed(sink, 1, n=[1, 2, 3, 4], word=["a", "b/c =", None, "a"], day=[day] * 4)
    folders = {str(Path(name).parent) for name in files(tmp_path)}
    assert folders == {
        f"day=2024-02-29/word={word}" for word in ("a", "b%2Fc%20%3D", "__HIVE_DEFAULT_PARTITION__")
    }
    table = pyarrow.dataset.dataset(tmp_path, partitioning="hive").to_table()
    rows = sorted((row["n"], row["word"], row["day"]) for row in table.to_pylist())
    assert rows == [(n, word, "2024-02-29") for n, word in ((1, "a"), (2, "b/c ="), (3, None), (4, "a"))]


def test_many_partitions_need_few_open_files(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(parquet_files, "_MAX_OPEN", 3)
    monkeypatch.setattr(parquet, "ROW_GROUP_BYTES", 1)
    sink = start(ParquetSink(tmp_path, partition_by=["p"]))
    for turn in range(3):
        write(sink, p=list(range(10)), n=[turn * 10 + p for p in range(10)])
        assert sink._files.open_count <= 3
    sink.commit(sink.prepare_commit(1))
    table = pyarrow.dataset.dataset(tmp_path, partitioning="hive").to_table()
    assert sorted(table["n"].to_pylist()) == list(range(30))


def test_a_type_that_widens_begins_another_file(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(parquet, "ROW_GROUP_BYTES", 1)
    sink = start(ParquetSink(tmp_path))
    write(sink, n=[1])
    write(sink, n=[2])
    write(sink, n=[0.5])
    sink.commit(sink.prepare_commit(1))
    tables = [pq.read_table(tmp_path / name)["n"].to_pylist() for name in files(tmp_path)]
    assert tables == [[1, 2], [0.5]]


def test_readers_may_take_files_away_once_they_are_committed(tmp_path: Path) -> None:
    sink = start(ParquetSink(tmp_path / "out"), tmp_path / "state")
    write(sink, n=[1])
    token = sink.prepare_commit(1)
    sink.commit(token)
    (tmp_path / "out" / files(tmp_path / "out")[0]).unlink()
    start(ParquetSink(tmp_path / "out"), tmp_path / "state", token)
    assert files(tmp_path / "out") == []


def test_a_late_commit_of_an_earlier_process_does_not_set_the_record_back(
    tmp_path: Path, monkeypatch: Any
) -> None:
    out, state = tmp_path / "out", tmp_path / "state"
    zombie = start(ParquetSink(out), state)
    write(zombie, n=[1])
    first = zombie.prepare_commit(1)
    second: Any = None

    def overtaken(staged: str, target: str) -> None:
        """Step 1 of the outdated process, delayed: its successor commits this epoch and the next one meanwhile."""
        nonlocal second
        successor = start(ParquetSink(out), state, first)
        write(successor, n=[2])
        second = successor.prepare_commit(2)
        successor.commit(second)

    monkeypatch.setattr(zombie, "rename", overtaken)
    zombie.commit(first)
    for name in files(out):
        (out / name).unlink()  # a reader removed them
    start(ParquetSink(out), state, second)
    assert files(out) == []


def test_two_processes_may_rename_the_same_file_at_the_same_time(tmp_path: Path, monkeypatch: Any) -> None:
    """A process that stalls during a commit, and its successor, which recovers the epoch."""
    sink = start(ParquetSink(tmp_path / "out"), tmp_path / "state")
    write(sink, n=[1])
    token = sink.prepare_commit(1)
    make_folder = sink.folder.make

    def successor_comes_first(path: str) -> None:
        make_folder(path)
        monkeypatch.setattr(sink.folder, "make", make_folder)
        start(ParquetSink(tmp_path / "out"), tmp_path / "state", token)

    monkeypatch.setattr(sink.folder, "make", successor_comes_first)
    sink.commit(token)
    (name,) = files(tmp_path / "out")
    assert pq.read_table(tmp_path / "out" / name)["n"].to_pylist() == [1]


def test_a_staged_file_that_vanished_is_an_error_not_a_loss(tmp_path: Path) -> None:
    sink = start(ParquetSink(tmp_path / "out"), tmp_path / "state")
    write(sink, n=[1])
    token = sink.prepare_commit(1)
    for path in (tmp_path / "out").rglob("*.staged"):
        path.unlink()
    with pytest.raises(ComponentError) as caught:
        start(ParquetSink(tmp_path / "out"), tmp_path / "state", token)
    message = str(caught.value)
    assert f"folder {tmp_path / 'out'}: a staged file was lost before it was committed: neither" in message
    assert "All nodes must reach the same folder" in message


def test_an_epoch_given_up_leaves_no_files_behind(tmp_path: Path) -> None:
    sink = start(ParquetSink(tmp_path))
    write(sink, n=[1])
    sink.prepare_commit(1)  # its commit failed, and the runtime continued
    committed(sink, 2, n=[2])
    assert staged(tmp_path) == []
    assert pyarrow.dataset.dataset(tmp_path).to_table()["n"].to_pylist() == [2]


@pytest.mark.parametrize("group_bytes", [1, 1 << 20], ids=["while writing", "at the end"])
def test_a_full_disk_loses_no_row_and_doubles_none(tmp_path: Path, monkeypatch: Any, group_bytes: int) -> None:
    """Whichever call fails, the same call continues where it stopped, also within a row group."""
    monkeypatch.setattr(parquet, "ROW_GROUP_BYTES", group_bytes)
    sink = start(ParquetSink(tmp_path, partition_by=["p"]))
    pwrite, left = os.pwrite, [10]

    def full(descriptor: int, data: bytes, offset: int) -> int:
        if left[0] == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        left[0] -= 1
        return pwrite(descriptor, data[: max(1, len(data) // 2)], offset)

    monkeypatch.setattr(os, "pwrite", full)
    refused = 0
    for n in range(20):
        while True:
            try:
                write(sink, p=["a", "b"], n=[2 * n, 2 * n + 1])
                break
            except SinkBusy:
                refused, left[0] = refused + 1, 3
    while True:
        try:
            token = sink.prepare_commit(1)
            break
        except SinkBusy:
            refused, left[0] = refused + 1, 3
    assert refused > 3
    monkeypatch.undo()
    sink.commit(token)
    table = pyarrow.dataset.dataset(tmp_path, partitioning="hive").to_table()
    assert sorted(table["n"].to_pylist()) == list(range(40))
    assert staged(tmp_path) == []


def test_a_file_that_the_disk_lost_half_of_is_not_published(tmp_path: Path, monkeypatch: Any) -> None:
    """After a failed fsync the next one succeeds although the bytes are lost, so it must not be repeated."""
    sink = start(ParquetSink(tmp_path))
    write(sink, n=[1])

    def fails(descriptor: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fails)
        with pytest.raises(SinkRefused, match=r"it cannot be written to the disk \(OSError: .*Input/output"):
            sink.prepare_commit(1)
    assert sink.prepare_commit(1) is None
    assert staged(tmp_path) == []


def test_a_type_that_parquet_has_not_is_refused_before_it_is_taken(tmp_path: Path) -> None:
    sink = start(ParquetSink(tmp_path))
    batch = pa.record_batch({"n": pa.array([pa.MonthDayNano([1, 2, 3])], pa.month_day_nano_interval())})
    with pytest.raises(ComponentError, match=r"a field's type cannot be written.*onvert the field in a bolt"):
        sink.write(batch, SOURCE)
    committed(sink, 1, n=[1])
    assert pyarrow.dataset.dataset(tmp_path).to_table()["n"].to_pylist() == [1]


class Lines(Spout):
    """Emits ⟨n⟩; one of them is not a number."""

    def declare_output_fields(self, declarer: Any) -> None:
        declarer.declare("n")

    def open(self, conf: Any, context: Any, collector: Any) -> None:
        self.collector, self.acked, self.failed, self.next = collector, 0, 0, 0

    def next_tuple(self) -> None:
        if self.next < 1000:
            value: Any = "not a number" if self.next == 500 else self.next
            self.collector.emit((value,), msg_id=self.next)
            self.next += 1

    def ack(self, msg_id: Any) -> None:
        self.acked += 1

    def fail(self, msg_id: Any, failure: Any) -> None:
        self.failed += 1


@pytest.mark.parametrize("delivery", ["at_least_once", "exactly_once"])
def test_a_folder_that_is_away_and_a_row_that_does_not_fit_cost_no_other(tmp_path: Path, delivery: str) -> None:
    builder = TopologyBuilder()
    builder.set_spout("lines", Lines())
    builder.set_bolt("sink", ParquetSink(tmp_path / "out")).shuffle_grouping("lines")
    settings = Settings(
        delivery=Delivery(delivery, epoch_interval=0.5, message_timeout=2.0, max_spout_pending=100)
    )
    runner = LocalRunner(builder.build("t", settings), folder=str(tmp_path / "state"))
    (tmp_path / "out").rename(tmp_path / "elsewhere")
    (tmp_path / "out").write_text("in the way")
    runner.run(3.0)
    (spout,) = runner.component("lines")
    assert (spout.acked, spout.failed) == (0, 0)
    assert runner.stats("sink")[0].away > 1.5
    (tmp_path / "out").unlink()
    (tmp_path / "elsewhere").rename(tmp_path / "out")
    runner.run(15.0)
    expected = [n for n in range(1000) if n != 500]
    assert sorted(pyarrow.dataset.dataset(tmp_path / "out").to_table()["n"].to_pylist()) == expected
    dead = StateDeadLetterStore(
        StateStore(str(tmp_path / "state" / "t" / "shared" / "sink" / FOLDER / "0"))
    ).read_all()
    assert [dead_letter.record.payload for dead_letter in dead] == [("not a number",)]
    assert spout.failed == 0
    assert runner.stats("sink")[0].given_up == 1


@pytest.mark.parametrize("row_group", [1, 1 << 20])
def test_a_stage_that_is_removed_is_made_again_where_no_row_is_lost(
    tmp_path: Path, monkeypatch: Any, row_group: int
) -> None:
    monkeypatch.setattr(parquet, "ROW_GROUP_BYTES", row_group)
    sink = start(ParquetSink(tmp_path / "out"))
    committed(sink, 1, n=[1])
    shutil.rmtree(tmp_path / "out" / "_staged")
    write(sink, n=[2])
    committed(sink, 2, n=[3])
    assert sorted(pyarrow.dataset.dataset(tmp_path / "out").to_table()["n"].to_pylist()) == [1, 2, 3]


def test_a_stage_that_is_removed_with_rows_in_it_is_refused_with_a_sentence(
    tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(parquet, "ROW_GROUP_BYTES", 1)
    sink = start(ParquetSink(tmp_path / "out"))
    write(sink, n=[1])
    write(sink, n=[2])  # row 1 is in the staged file
    assert staged(tmp_path)
    shutil.rmtree(tmp_path / "out" / "_staged")
    with pytest.raises(
        SinkRefused, match=r"1 staged files were removed from .*written again from the last commit"
    ):
        sink.prepare_commit(1)


def test_a_target_folder_that_is_missing_is_waited_for_and_not_made_again(tmp_path: Path) -> None:
    """The folder may only be unmounted for a moment."""
    sink = start(ParquetSink(tmp_path / "out"))
    write(sink, n=[1])
    (tmp_path / "out").rename(tmp_path / "elsewhere")
    with pytest.raises(SinkBusy):
        sink.prepare_commit(1)
    assert not (tmp_path / "out").exists()
    (tmp_path / "elsewhere").rename(tmp_path / "out")
    sink.commit(sink.prepare_commit(1))
    assert len(files(tmp_path / "out")) == 1


def test_a_folder_that_is_a_file_is_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("")
    with pytest.raises(SinkBusy, match=r"'sink' \(task 1\), folder .*out: the folder cannot be written to"):
        start(ParquetSink(tmp_path / "out"))


def test_a_file_system_without_rename(tmp_path: Path) -> None:
    """A file system that is not local; its move is a copy and a delete, as on an object store."""
    url = "memory://penstock-test-parquet/out/"
    sink = start(ParquetSink(url, partition_by=["p"]), tmp_path)
    write(sink, p=["a", "b"], n=[1, 2])
    kept = sink.prepare_commit(1)
    write(sink, p=["a"], n=[3])
    sink.prepare_commit(2)
    files = fsspec.filesystem("memory")
    # A crash after the first copy and before its delete.
    first, name = kept["files"][0]
    files.copy(
        f"/penstock-test-parquet/out/_staged/t/sink/0/{sink.incarnation.task}/{first}",
        f"/penstock-test-parquet/out/{name}",
    )
    start(ParquetSink(url, partition_by=["p"]), tmp_path, kept)
    found = files.find("/penstock-test-parquet/out")
    assert [path for path in found if path.endswith(".staged")] == []
    written = sorted(path for path in found if path.endswith(".parquet"))
    assert [pq.read_table(files.open(path))["n"].to_pylist() for path in written] == [[1], [2]]
    assert [path.split("/")[-2] for path in written] == ["p=a", "p=b"]


def test_an_object_store_that_is_away_is_waited_for_though_its_client_raises_no_os_error(
    tmp_path: Path, monkeypatch: Any
) -> None:
    url = "memory://penstock-test-parquet/away/"
    sink = start(ParquetSink(url), tmp_path)
    write(sink, n=[1, 2])
    files = fsspec.filesystem("memory")

    def away(*_: Any, **__: Any) -> None:
        raise RuntimeError("EndpointConnectionError")

    with monkeypatch.context() as patch:
        patch.setattr(type(files), "put_file", away)
        with pytest.raises(SinkBusy, match="EndpointConnectionError"):
            sink.prepare_commit(1)
    token = sink.prepare_commit(1)
    with monkeypatch.context() as patch:
        patch.setattr(type(files), "mv", away)
        with pytest.raises(SinkBusy, match="EndpointConnectionError"):
            sink.commit(token)
    sink.commit(token)
    (path,) = [each for each in files.find("/penstock-test-parquet/away") if each.endswith(".parquet")]
    assert pq.read_table(files.open(path))["n"].to_pylist() == [1, 2]


def test_a_partition_field_that_is_missing_or_the_only_one(tmp_path: Path) -> None:
    sink = start(ParquetSink(tmp_path, partition_by=["day"]))
    for columns in ({"n": [1]}, {"day": [1]}):
        with pytest.raises(ComponentError, match=r"partition_by needs \(day\) and one more"):
            write(sink, **columns)


def test_partition_by_is_not_one_string() -> None:
    with pytest.raises(TopologyError, match=r"partition_by is 'day', not a sequence of fields. Write .*\['day'\]"):
        ParquetSink("out", partition_by="day")


@pytest.mark.parametrize("nested", [False, True])
def test_a_time_that_does_not_fit_parquet_is_rejected_when_it_is_written(tmp_path: Path, nested: bool) -> None:
    """A time in seconds, which Parquet stores in milliseconds. Later the sink could not tell which row it was."""
    sink = start(ParquetSink(tmp_path))
    kind = pa.timestamp("s")

    def batch(seconds: int) -> pa.RecordBatch:
        times = pa.array([[seconds]], pa.list_(kind)) if nested else pa.array([seconds], kind)
        return pa.record_batch({"at": times})

    sink.write(batch(1), SOURCE)
    with pytest.raises(ComponentError, match=r"cannot be written .*4611686018427387904"):
        sink.write(batch(2**62), SOURCE)
    sink.write(batch(2), SOURCE)
    sink.commit(sink.prepare_commit(1))
    assert pq.read_table(tmp_path / files(tmp_path)[0]).num_rows == 2
