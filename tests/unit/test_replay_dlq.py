"""penstock dlq, on the files of a running and of a stopped topology."""

from __future__ import annotations

import pytest

from penstock.cli.main import main
from penstock.replay import EmbeddedStore, QueueEden, Replayer, ReplayRecord
from penstock.state.generations import Ownership
from penstock.state.store import StateStore
from penstock.topology.components import Context, Failure


@pytest.fixture
def make(tmp_path, monkeypatch):
    """Creates the queues of a task with dead letters in them, as a running topology has them open."""
    monkeypatch.setenv("COLUMNS", "200")
    opened = []

    def queues(component="lines", index=0, topology="shop", dead_letters=()):
        tasks = {component: tuple(range(1, 9))}
        folder = str(tmp_path / "state" / topology / component / str(index))
        found = EmbeddedStore().open(
            Context(topology, component, index + 1, index, tasks, delivery="at_least_once", folder=folder)
        )
        found.dead.add(dead_letters)
        opened.append(found)
        return found

    yield queues
    for each in opened:
        each.close()


@pytest.fixture
def dlq(tmp_path, capsys):
    def run(action, *arguments, topology="shop", code=0):
        options = ["--state-dir", str(tmp_path / "state"), "--topology", topology]
        assert main(["dlq", action, *arguments, *options]) == code
        said = capsys.readouterr()
        return said.err if code else said.out

    return run


def dead_letter(value, error="boom", component="split"):
    return ReplayRecord((value, 7), 5, error, component, 1_700_000_000.0)


def test_list_and_show(make, dlq):
    make(dead_letters=[dead_letter("a"), dead_letter("[b]markup[/b]", error="first line\n" + "x" * 100)])
    make("clicks", 1, dead_letters=[dead_letter("c", component="")])
    said = dlq("list")
    assert "dead letters of shop" in said
    for part in ("lines.0.0", "lines.0.1", "clicks.1.0", "('[b]markup[/b]', 7)", "first line xxx", "timed out"):
        assert part in said
    said = dlq("list", "--component", "clicks")
    assert "clicks.1.0" in said
    assert "lines.0" not in said
    said = dlq("show", "lines.0.1")
    assert "attempts      5" in said
    assert "error         first line\n" + "x" * 100 in said
    assert "value 0       '[b]markup[/b]'" in said


def test_no_dead_letters(make, dlq):
    make()
    assert dlq("list") == "no dead letters in topology 'shop'\n"
    assert dlq("drop", "--all") == "0 dead letters dropped\n"


def test_a_topology_that_has_given_nothing_up(dlq, tmp_path):
    Ownership("shop").claim(StateStore(str(tmp_path / "state")).child("shop"))
    assert dlq("list") == "no dead letters in topology 'shop'\n"
    assert "topology 'shpo' has no replay queues, PersistBolt or dead letters here." in dlq(
        "list", topology="shpo", code=2
    )


def test_drop(make, dlq):
    queues = make(dead_letters=[dead_letter("a"), dead_letter("b"), dead_letter("c")])
    assert dlq("drop", "lines.0.1") == "1 dead letter dropped\n"
    assert [kept.record.payload[0] for kept in queues.dead.read_all()] == ["a", "c"]
    assert dlq("drop", "--all") == "2 dead letters dropped\n"
    assert queues.dead.read_all() == []
    assert queues.from_.empty


def test_sent_back_dead_letters_reach_a_running_topology(make, dlq, tmp_path):
    eden = QueueEden(tmp_path / "eden", ("word", "n"))
    eden.open({}, Context("shop", "lines", 1, 0, {"lines": (1,)}))
    replayer = Replayer(eden, make(dead_letters=[dead_letter("a"), dead_letter("b")]), max_attempts=1)
    replayer.start()
    assert replayer.take(10) == []
    assert dlq("send-back", "--all") == "2 dead letters sent back\n"
    assert replayer.wait(20)
    entries = replayer.take(10)
    assert [entry.record.payload for entry in entries] == [("a", 7), ("b", 7)]
    assert [entry.record.attempts for entry in entries] == [0, 0]
    replayer.fail([entries[0].place], Failure("count", "again"))
    replayer.ack([entries[1].place])
    replayer.close()
    assert "lines.0.3" in dlq("list")  # numbering continues after two dead letters and the record of their removal


def test_sent_back_dead_letters_wait_for_a_topology_that_does_not_run(make, dlq):
    queues = make(dead_letters=[dead_letter("a")])
    queues.pointer.store(True)
    queues.close()
    dlq("send-back", "lines.0.0")
    again = make()
    assert again.from_.empty
    # From and To are exchanged: this queue is From.
    assert [record.payload for _, record in again.to.read(10)] == [("a", 7)]


def test_errors_have_a_hint(make, dlq):
    said = dlq("list", code=2)
    assert "topology 'shop' has no replay queues, PersistBolt or dead letters here." in said
    make()
    assert "found only those of shop" in dlq("list", topology="other", code=2)
    assert "keeps no dead letters here. These do: lines." in dlq("list", "--component", "x", code=2)
    assert "no dead letters were chosen. Give ids from the list, or --all." in dlq("drop", code=2)
    assert "no dead letter has the id lines.0.9." in dlq("show", "lines.0.9", code=2)
