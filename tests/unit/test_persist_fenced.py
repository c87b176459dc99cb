"""Writes to stores without transactions, in steps that others interrupt; how values become columns and cells."""

from __future__ import annotations

import datetime
import sys

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.clock import SimulatedClock
from penstock.errors import EnvironmentFault, TopologyError
from penstock.persist.cassandra import CassandraStore, _others_of_their_keys, cql_type, create_table, fitting
from penstock.persist.fenced import CLAIM_SECONDS, FencedClient, WriteState
from penstock.persist.hbase import HBaseStore, row_cells
from penstock.persist.stores import Overtaken
from penstock.storage.tables import Rejected


class Cells:
    """What stays when processes die: of each key the value of the highest version, and the states of queues."""

    def __init__(self):
        self.rows, self.states = {}, {}
        self.clock = SimulatedClock(1000.0)

    def counts(self):
        return {key: value for key, (_, value) in self.rows.items()}


class CellsClient(FencedClient):
    def __init__(self, cells, step=lambda name: None):
        super().__init__("the cells", 1_000, 10, cells.clock, cells.clock.advance)
        self.cells, self.step = cells, step

    def read_state(self, queue):
        self.step("read")
        return self.cells.states.get(queue, "")

    def swap_state(self, queue, before, after):
        self.step("swap")
        if self.cells.states.get(queue, "") != before:
            return False
        self.cells.states[queue] = after
        self.step("swapped")
        return True

    def write_rows(self, rows, version):
        last = dict(zip(rows["word"].to_pylist(), rows["count"].to_pylist(), strict=True))
        for word, count in last.items():
            self.step("row")
            if self.cells.rows.get(word, (-1, None))[0] <= version:
                self.cells.rows[word] = (version, count)
        return [Rejected(at, "bad") for at, word in enumerate(rows["word"].to_pylist()) if word == "bad"]

    def close(self):
        pass


def words(*rows):
    return pa.table({"word": [word for word, _ in rows], "count": [count for _, count in rows]})


def no_reject(rejected):
    raise AssertionError(f"rejected: {rejected}")


def test_rows_and_progress_get_there_in_steps():
    cells, steps = Cells(), []
    client = CellsClient(cells, steps.append)
    client.write("q", words(("a", 1), ("a", 2)), "", "one", no_reject)
    assert steps == ["read", "swap", "swapped", "row", "swap", "swapped"]
    assert cells.counts() == {"a": 2}
    assert client.progress("q") == "one"
    rejected = []
    client.write("q", words(("bad", 1), ("b", 2)), "one", "two", rejected.extend)
    assert [each.row for each in rejected] == [0]
    client.write("q", pa.table({}), "two", "three", no_reject)
    assert client.progress("q") == "three"
    assert WriteState.decode(cells.states["q"]).claimed is False


def test_versions_grow_though_the_clock_was_set_back():
    cells = Cells()
    CellsClient(cells).write("q", words(("a", 1)), "", "one", no_reject)
    version, _ = cells.rows["a"]
    assert version == 1_000_000
    cells.clock = SimulatedClock(5.0)
    CellsClient(cells).write("q", words(("a", 2)), "one", "two", no_reject)
    assert cells.rows["a"] == (version + 10, 2)


def test_another_processor_at_work_is_waited_for_and_one_that_died_only_for_a_moment():
    cells = Cells()
    cells.states["q"] = WriteState("one", 5, claimed=True).encode()
    begun = cells.clock.now()
    CellsClient(cells).write("q", words(("a", 1)), "one", "two", no_reject)
    assert CLAIM_SECONDS <= cells.clock.now() - begun < CLAIM_SECONDS + 0.1

    cells.states["q"] = WriteState("two", 5, claimed=True).encode()
    client = CellsClient(cells)

    def completes(seconds):
        cells.states["q"] = WriteState("three", 6).encode()

    client._pause = completes
    with pytest.raises(Overtaken, match="another processor also writes for 'q'"):
        client.write("q", words(("a", 0)), "two", "three", no_reject)
    assert cells.counts() == {"a": 1}


class Ended(BaseException):
    """Stands for the end of the process."""


ROWS = [("a", 0), ("b", 1), ("a", 2), ("c", 3), ("b", 4), ("a", 5), ("c", 6), ("a", 7)]
WANTED = {"a": 7, "b": 4, "c": 6}


@given(st.integers(1, 4), st.lists(st.tuples(st.integers(1, 30), st.integers(1, 4)), max_size=4))
def test_whichever_processors_die_or_stall_each_key_ends_with_its_last_row(size, disturbances):
    """At each disturbance a processor stops after some steps; others write on; and then it resumes, or not."""
    cells = Cells()

    def run(size, disturbances):
        steps = 0

        def step(name):
            nonlocal steps
            steps += 1
            if disturbances and steps == disturbances[0][0]:
                run(disturbances[0][1], disturbances[1:])
                if disturbances[0][0] % 2:
                    raise Ended

        client = CellsClient(cells, step)
        try:
            before = client.progress("q")
            while (done := int(before or 0)) < len(ROWS):
                part = ROWS[done : done + size]
                client.write("q", words(*part), before, str(done + len(part)), no_reject)
                before = str(done + len(part))
        except (Ended, Overtaken):
            return

    run(size, disturbances)
    run(2, [])
    assert cells.counts() == WANTED
    assert WriteState.decode(cells.states["q"]).progress == str(len(ROWS))


# -- Cassandra


def test_the_table_has_the_types_of_the_rows():
    schema = pa.schema(
        {
            "word": pa.dictionary(pa.int8(), pa.string()),
            'o"dd': pa.uint64(),
            "at": pa.timestamp("ms"),
            "x": pa.list_(pa.int8()),
        }
    )
    store = CassandraStore("h", "space.Words", key=["word", "at"])
    assert create_table(store, schema) == (
        'CREATE TABLE IF NOT EXISTS "space"."Words" ("word" text, "o""dd" varint, "at" timestamp, "x" text, '
        'PRIMARY KEY ("word", "at"))'
    )
    kinds = {pa.timestamp("us"): "text", pa.float16(): "float", pa.date64(): "date", pa.duration("s"): "bigint"}
    kinds |= {pa.time32("s"): "time", pa.decimal128(5, 2): "decimal", pa.binary(3): "blob", pa.null(): "text"}
    assert {kind: cql_type(kind) for kind in kinds} == kinds


def test_rows_that_do_not_fit_are_found_before_anything_is_sent():
    rows = pa.table({"word": ["a", None, "b", "c"], "n": [1.0, 2.0, 2.5, 3.0]})
    kept, rejected = fitting(rows, [pa.string(), pa.int64()], ["word"])
    assert [each.row for each in rejected] == [1, 2]
    assert kept.select(["word", "n"]).to_pylist() == [{"word": "a", "n": 1}, {"word": "c", "n": 3}]
    kept, rejected = fitting(pa.table({"word": [None]}), [pa.string()], ["word"])
    assert (kept.num_rows, len(rejected)) == (0, 1)
    moment = pa.table({"word": ["a"], "at": pa.array([datetime.datetime(2024, 1, 1, 0, 0, 0, 1)])})
    assert len(fitting(moment, [pa.string(), pa.timestamp("ms")], ["word"])[1]) == 1


def test_of_a_key_whose_row_was_refused_the_others_are_tried():
    rows, _ = fitting(words(("a", 1), ("b", 2), ("a", 3), ("c", 4), ("a", 5)), [None, None], ["word"])
    again = _others_of_their_keys(rows, ["word"], [4, 3])
    assert again["count"].to_pylist() == [1, 3]
    assert _others_of_their_keys(rows, ["word"], []).num_rows == 0


# -- HBase


def test_cells_are_text_and_of_each_key_the_last_row():
    rows = pa.table(
        {"word": ["a", "b", "a", None, ""], "n": [1, 2, None, 4, 5], "yes": [True, False, True, True, None]}
    )
    cells, rejected = row_cells(rows, ["word"], "r")
    assert cells == {
        b"a": {b"r:word": b"a", b"r:n": None, b"r:yes": b"true"},
        b"b": {b"r:word": b"b", b"r:n": b"2", b"r:yes": b"false"},
    }
    assert [(each.row, each.error) for each in rejected] == [
        (3, "None in the key's column 'word'"),
        (4, "the row key has 0 bytes, not 1 to 32767"),
    ]


@given(st.lists(st.tuples(st.binary(max_size=4), st.binary(max_size=4)), unique=True))
def test_different_keys_of_several_columns_have_different_row_keys(pairs):
    one, two = [pa.array([pair[at] for pair in pairs], pa.binary()) for at in (0, 1)]
    cells, rejected = row_cells(pa.table({"one": one, "two": two}), ["one", "two"], "r")
    assert len(cells) == len(pairs)
    assert rejected == []


# -- settings that are rejected


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: CassandraStore("h", "table", key=["a"]), "table is 'table', not a keyspace and a table"),
        (lambda: CassandraStore("h", "k.t", key=[]), "no key, and Cassandra cannot append a row once"),
        (lambda: CassandraStore(["h:1", "i:2"], "k.t", key=["a"]).check("here"), "with one port"),
        (lambda: CassandraStore([], "k.t", key=["a"]).check("here"), "not hosts of Cassandra"),
        (lambda: CassandraStore("h", "k.t", key=["a"], consistency="MOST").check("here"), "consistency is 'MOST'"),
        (lambda: HBaseStore("h:1", "t", key=[]), "no key, and HBase cannot append a row once"),
        (lambda: HBaseStore("h", "t", key=["a"]), "address is 'h', not that of a Thrift server"),
    ],
)
def test_what_cannot_work_is_refused_at_once(make, says):
    with pytest.raises(TopologyError, match=says):
        make()


def test_stores_name_themselves_without_passwords():
    store = CassandraStore(["a:1", "b:1"], "k.t", key=["x"], user="me", password="geheim")
    assert str(store) == "Cassandra table 'k.t' at a:1, b:1"
    assert str(HBaseStore("h:9090", "ns:t", key=["x"])) == "HBase table 'ns:t' at h:9090"


@pytest.mark.parametrize(
    ("store", "library"),
    [
        (CassandraStore("h", "k.t", key=["a"]), "cassandra"),
        (HBaseStore("h:1", "t", key=["a"]), "happybase"),
    ],
    ids=["cassandra", "hbase"],
)
def test_a_missing_library_is_named(store, library, monkeypatch):
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(
        EnvironmentFault, match=r"cannot be imported .*pip install \"penstock\[(cassandra|hbase)\]"
    ):
        store.check("here")
