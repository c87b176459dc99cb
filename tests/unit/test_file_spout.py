"""FileSpout and FileEden: lines, positions, delivery guarantees, growing files."""

from __future__ import annotations

import os
import tracemalloc

import numpy as np
import pytest

from penstock.connectors import lines as lines_module
from penstock.connectors.file_eden import FileEden
from penstock.connectors.files import FileSpout
from penstock.connectors.lines import split_lines
from penstock.errors import EnvironmentFault, SettingError, StateError
from penstock.state.values import TaskState
from penstock.topology.components import Context, Failure
from penstock.topology.streams import OutputDeclarer


class Collected:
    def __init__(self):
        self.lines = []
        self.ids = []

    def emit_batch(self, columns, stream="default", msg_ids=None):
        [column] = columns
        found = column if isinstance(column, list) else column.to_pylist()
        self.lines += found
        self.ids += msg_ids if msg_ids is not None else [None] * len(found)

    def take(self):
        taken = list(zip(self.ids, self.lines, strict=True))
        self.lines, self.ids = [], []
        return taken


def context(index=0, tasks=1, delivery="at_most_once", state=None, folder="", **more):
    ids = {"lines": tuple(range(1, tasks + 1))}
    return Context(
        "t",
        "lines",
        index + 1,
        index,
        ids,
        delivery=delivery,
        state=TaskState() if state is None else state,
        folder=str(folder),
        **more,
    )


def opened(spout, **kwargs):
    out = Collected()
    spout.open({}, context(**kwargs), out)
    spout.activate()
    return spout, out


def run(spout, out):
    """Calls the spout until it emits nothing."""
    taken = []
    while True:
        spout.next_batch()
        new = out.take()
        if not new:
            return taken
        taken += new


def restored(state):
    """The state of a new process: the contents of the old one's snapshot."""
    fresh = TaskState()
    fresh.restore({name: [data] for name, (_, _, data) in state.snapshot(full=True).encode().items()})
    return fresh


def texts(taken):
    return [text for _, text in taken]


def test_lines_of_every_kind(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes("one\r\n\ntwo ü\n".encode() + b"bad \xe2\xff\nlast")
    spout, out = opened(FileSpout(str(path)))
    assert texts(run(spout, out)) == ["one", "", "two ü", "bad \ufffd\ufffd", "last"]
    spout.close()


def test_declares_one_text_field(tmp_path):
    declarer = OutputDeclarer("lines")
    FileSpout("x", fields=("sentence",)).declare_output_fields(declarer)
    assert str(declarer.streams["default"].fields[0].type) == "string"
    assert declarer.streams["default"].field_names == ("sentence",)


def test_split_lines_matches_python(tmp_path):
    data = b"".join(b"%d\n" % number for number in range(10_000))
    assert split_lines(data).to_pylist() == data.decode().splitlines()


def test_a_line_longer_than_a_block(tmp_path, monkeypatch):
    monkeypatch.setattr(lines_module, "BLOCK", 8)
    path = tmp_path / "a.txt"
    path.write_text("short\n" + "x" * 100 + "\nend\n")
    spout, out = opened(FileSpout(str(path)))
    assert texts(run(spout, out)) == ["short", "x" * 100, "end"]


def test_files_are_spread_over_tasks(tmp_path):
    for name in "dbace":
        (tmp_path / f"{name}.txt").write_text(f"{name}1\n{name}2\n")
    shares = []
    for index in range(2):
        spout, out = opened(FileSpout(str(tmp_path / "*.txt")), index=index, tasks=2)
        shares.append(texts(run(spout, out)))
    assert shares == [["a1", "a2", "c1", "c2", "e1", "e2"], ["b1", "b2", "d1", "d2"]]


def test_more_tasks_than_files(tmp_path):
    (tmp_path / "a.txt").write_text("x\n")
    spout, out = opened(FileSpout(str(tmp_path / "a.txt")), index=1, tasks=2)
    assert run(spout, out) == []
    spout.before_snapshot()


def test_follow_waits_for_whole_lines(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("one\ntw")
    spout, out = opened(FileSpout(str(path), follow=True))
    assert texts(run(spout, out)) == ["one"]
    with path.open("a") as file:
        file.write("o\nthree\n")
    assert texts(run(spout, out)) == ["two", "three"]
    path.write_text("new\n")  # the file was rotated
    assert texts(run(spout, out)) == ["new"]


def test_start_at_the_end(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("old\n")
    spout, out = opened(FileSpout(str(path), start="end", follow=True))
    assert run(spout, out) == []
    with path.open("a") as file:
        file.write("new\n")
    assert texts(run(spout, out)) == ["new"]


def test_exactly_once_the_read_position_is_stored(tmp_path, monkeypatch):
    monkeypatch.setattr(lines_module, "BLOCK", 30)
    (tmp_path / "a.txt").write_text("".join(f"a{n}\n" for n in range(40)))
    (tmp_path / "b.txt").write_text("".join(f"b{n}\n" for n in range(40)))
    expected = [f"{name}{n}" for name in "ab" for n in range(40)]
    for turns in (0, 1, 3, 9):
        state = TaskState()
        spout, out = opened(FileSpout(str(tmp_path / "*.txt")), delivery="exactly_once", state=state)
        for _ in range(turns):
            spout.next_batch()
        first = out.take()
        assert all(id is None for id, _ in first)
        spout.before_snapshot()
        second, out = opened(FileSpout(str(tmp_path / "*.txt")), delivery="exactly_once", state=restored(state))
        assert texts(first) + texts(run(second, out)) == expected


def test_at_least_once_the_first_unacked_line_is_stored(tmp_path, monkeypatch):
    monkeypatch.setattr(lines_module, "BLOCK", 30)
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text("".join(f"{name}{n}\n" for n in range(20)))
    state = TaskState()
    spout, out = opened(FileSpout(str(tmp_path / "*.txt")), delivery="at_least_once", state=state)
    taken = run(spout, out)
    assert [id for id, _ in taken] == list(range(40))
    spout.ack_many([id for id, text in taken if text not in ("a13", "b3")])
    spout.before_snapshot()
    second, out = opened(
        FileSpout(str(tmp_path / "*.txt")), delivery="at_least_once", state=(later := restored(state))
    )
    again = run(second, out)
    assert texts(again) == [f"a{n}" for n in range(13, 20)] + [f"b{n}" for n in range(20)]
    second.ack_many([id for id, text in again if text != "b3"])
    second.before_snapshot()
    third, out = opened(FileSpout(str(tmp_path / "*.txt")), delivery="at_least_once", state=restored(later))
    assert texts(run(third, out)) == [f"b{n}" for n in range(3, 20)]


def test_a_failed_line_comes_again_a_bounded_number_of_times_and_is_a_dead_letter(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("good\nbad\n")
    state = TaskState()
    dead = []
    full = [StateError("state store", "the file cannot be created (No space left on device)")]

    def add(rows, failure):
        if full:
            raise full.pop()
        dead.append((rows, failure))

    spout, out = opened(
        FileSpout(str(path), max_attempts=3), delivery="at_least_once", state=state, add_dead_letters=add
    )
    (good, _), (bad, _) = run(spout, out)
    spout.ack(good)
    for _ in range(2):
        spout.fail(bad, Failure("split", "boom"))
        assert run(spout, out) == [(bad, "bad")]
    spout.fail(bad, Failure("split", "boom"))
    assert run(spout, out) == [(bad, "bad")], "its dead letter could not be stored: it stays with the spout"
    spout.fail(bad, Failure("split", "boom"))
    assert run(spout, out) == []
    assert dead == [([("bad",)], Failure("split", "boom", 3))]
    spout.before_snapshot()
    assert state.value("positions").value == {str(path): 9}


def test_late_acks_and_fails_change_nothing(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("x\ny\n")
    spout, out = opened(FileSpout(str(path)), delivery="at_least_once")
    (x, _), (y, _) = run(spout, out)
    spout.fail(x, Failure("", "timed out"))
    spout.ack_many([x, y])
    spout.fail(y, Failure("", "timed out"))
    assert run(spout, out) == []


def test_errors_have_a_hint(tmp_path):
    with pytest.raises(SettingError, match=r"FileSpout\(start\): 'middle' is neither begin nor end"):
        FileSpout("x", start="middle")
    with pytest.raises(SettingError, match=r"a line is one field, but 2 are declared. Split lines in a bolt."):
        FileSpout("x", fields=("a", "b"))
    with pytest.raises(EnvironmentFault, match=r"component 'lines', FileSpout: there is nothing at .* Check"):
        opened(FileSpout(str(tmp_path / "none-*.txt")))


def test_file_eden_keeps_its_position_in_the_state(tmp_path):
    state = TaskState()
    path = tmp_path / "a.txt"
    path.write_text("a\nb\nc\nd\n")
    eden = FileEden(str(path))
    eden.open({}, context(delivery="at_least_once", state=state))
    first = eden.read(3)
    assert [values for _, values in first] == [("a",), ("b",), ("c",)]
    eden.done([first[0][0], first[2][0]])
    eden.before_snapshot()
    eden.close()
    eden.open({}, context(delivery="at_least_once", state=state))
    assert [values for _, values in eden.read(10)] == [("b",), ("c",), ("d",)]
    assert eden.read(10) == []
    eden.close()


@pytest.mark.parametrize("delivery", ["at_least_once", "exactly_once"])
@pytest.mark.parametrize("form", ["spout", "source"])
def test_a_crash_before_the_first_commit_loses_nothing_of_a_start_at_the_end(tmp_path, delivery, form):
    path, folder = tmp_path / "a.txt", tmp_path / "state"
    path.write_text("old\n")

    def lines_of_a_new_process(state=None):
        where = {"delivery": delivery, "folder": folder, "state": state}
        if form == "spout":
            spout, out = opened(FileSpout(str(path), start="end", follow=True), **where)
            return spout, lambda: texts(run(spout, out))
        eden = FileEden(str(path), start="end", follow=True)
        eden.open({}, context(**where))
        return eden, lambda: [positions.append(at) or values[0] for at, values in eden.read(100)]

    positions = []

    _, read = lines_of_a_new_process()
    with path.open("a") as file:
        file.write("emitted, then the process is killed\n")
    assert read() == ["emitted, then the process is killed"]
    with path.open("a") as file:
        file.write("written before the restart\n")
    state = TaskState()
    again, read = lines_of_a_new_process(state)
    assert read() == ["emitted, then the process is killed", "written before the restart"]
    if form == "spout" and delivery == "at_least_once":
        again.ack_many([0, 1])
    elif form == "source":
        again.done(positions[-2:])
    for _ in range(2):
        again.before_snapshot()
        again.after_commit()
    assert list(folder.iterdir()) == []  # the positions are now in the committed state
    with path.open("a") as file:
        file.write("after the commit\n")
    assert lines_of_a_new_process(restored(state))[1]() == ["after the commit"]


def test_the_position_in_the_state_is_preferred_to_the_recorded_start(tmp_path):
    path, folder, state = tmp_path / "a.txt", tmp_path / "state", TaskState()
    path.write_text("old\n")
    where = {"delivery": "exactly_once", "folder": folder}
    spout, out = opened(FileSpout(str(path), start="end", follow=True), state=state, **where)
    with path.open("a") as file:
        file.write("in the first epoch\n")
    assert texts(run(spout, out)) == ["in the first epoch"]
    spout.before_snapshot()
    with path.open("a") as file:
        file.write("in the second\n")
    spout, out = opened(FileSpout(str(path), start="end", follow=True), state=restored(state), **where)
    assert texts(run(spout, out)) == ["in the second"]


def test_half_a_start_record_counts_as_none(tmp_path):
    path, folder = tmp_path / "a.txt", tmp_path / "state"
    path.write_text("old\n")
    folder.mkdir()
    (folder / "start.json").write_text('{"/a.t')
    spout, out = opened(FileSpout(str(path), start="end", follow=True), delivery="at_least_once", folder=folder)
    with path.open("a") as file:
        file.write("new\n")
    assert texts(run(spout, out)) == ["new"]


# ---- a source that is read again ------------------------------------------------------------------------------


def opened_eden(path, **options):
    eden = FileEden(str(path), **options)
    eden.open({}, context(delivery="at_least_once", state=TaskState()))
    return eden


def read_again(eden, positions):
    """All of them: ``read_again`` may return the first ones only."""
    found, positions = [], np.array(positions, np.int64)
    while len(found) < len(positions):
        some = eden.read_again(positions[len(found) :])
        assert some
        found += some
    return found


@pytest.mark.parametrize("block", [16, 100, 1 << 20])
def test_lines_are_read_again_where_they_were_read(tmp_path, monkeypatch, block):
    monkeypatch.setattr("penstock.connectors.lines.BLOCK", block)
    monkeypatch.setattr("penstock.connectors.file_eden.BLOCK", block)
    monkeypatch.setattr("penstock.connectors.file_eden._AGAIN_BYTES", 50)
    for name in "ab":
        lines = [f"{name}{number}" + "x" * (number * 7 % 40) for number in range(40)]
        (tmp_path / f"{name}.txt").write_bytes("\r\n".join([*lines, "", "ä no newline"]).encode() + b"\xff")
    eden = opened_eden(tmp_path / "*.txt")
    read = []
    while some := eden.read(7):
        read += some
    assert len(read) == 2 * 42
    some = sorted(read)[::3]
    assert read_again(eden, [at for at, _ in some]) == [values for _, values in some]
    some = sorted(read)[30:60]
    assert read_again(eden, [at for at, _ in some]) == [values for _, values in some]
    with (tmp_path / "b.txt").open("a") as file:
        file.write("goes on\n")
    assert [values for _, values in eden.read(9)] == [("goes on",)]
    last = max(read)
    assert read_again(eden, [last[0]]) == [last[1]]  # without what was appended to its line
    eden.close()


def test_reading_again_does_not_disturb_reading(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("".join(f"{number}\n" for number in range(100)))
    eden = opened_eden(path)
    read = []
    for _ in range(10):
        read += eden.read(10)
        assert read_again(eden, [at for at, _ in read]) == [values for _, values in read]
    assert [values[0] for _, values in read] == [str(number) for number in range(100)]
    eden.close()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda path: os.truncate(path, 0), "no line begins there any more"),
        (lambda path: os.truncate(path, 7), "no line begins there any more"),
        (lambda path: os.truncate(path, 12), "the file is shorter than before"),
        (lambda path: path.write_text("other lines, longer than those before\n"), "no line begins there any more"),
    ],
)
def test_a_line_that_is_gone_says_where_it_was(tmp_path, change, reason):
    path = tmp_path / "a.txt"
    path.write_text("one\ntwo\nthree\nfour\n")
    eden = opened_eden(path)
    read = eden.read(4)
    change(path)
    found = read_again(eden, [at for at, _ in read])[2]
    assert (found.damaged, found.payload) == (True, (f"{path} byte 8".encode(),))
    assert found.error == f"{path} byte 8 can no longer be read: {reason}"
    eden.close()


def test_a_file_that_is_replaced_by_another_stays_readable(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("one\ntwo\n")
    eden = opened_eden(path)
    read = eden.read(4)
    (tmp_path / "b").write_text("3\n")
    (tmp_path / "b").rename(path)
    assert read_again(eden, [at for at, _ in read]) == [("one",), ("two",)]
    eden.close()


def test_a_file_that_begins_again_has_new_positions(tmp_path):
    path, state = tmp_path / "a.txt", TaskState()
    path.write_text("one\ntwo\n")
    eden = FileEden(str(path), follow=True)
    eden.open({}, context(delivery="at_least_once", state=state))
    before = eden.read(9)
    path.write_text("x\ny\n")
    after = eden.read(9)
    assert [values for _, values in after] == [("x",), ("y",)]
    assert not {at for at, _ in before} & {at for at, _ in after}
    lost = read_again(eden, [at for at, _ in before])
    assert "the file became shorter, and is read from its beginning" in lost[0].error
    assert read_again(eden, [at for at, _ in after]) == [("x",), ("y",)]
    eden.done([before[0][0], before[1][0], after[0][0]])
    eden.before_snapshot()
    assert state.value("positions").value == {str(path): 2}
    eden.close()


def test_a_line_in_flight_takes_few_bytes_whatever_its_size(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text(("x" * 2000 + "\n") * 20_000)
    eden = opened_eden(path)
    eden.read(2000)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        while eden.read(2000):
            pass
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert grown / 18_000 < 60
    eden.close()
