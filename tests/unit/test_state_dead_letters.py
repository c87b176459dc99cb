"""Dead letters of sinks and plain spouts: stored in the state directory, shown by ``penstock dlq``."""

from __future__ import annotations

import pytest

from penstock.cli.main import main
from penstock.replay.embedded import EmbeddedStore
from penstock.replay.records import ReplayRecord
from penstock.replay.state_dead_letters import FOLDER, StateDeadLetterStore, epoch_dead_letters
from penstock.state.store import StateStore
from penstock.topology.components import Context


@pytest.fixture
def dead_letters(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    found = StateDeadLetterStore(StateStore(str(tmp_path / "shop" / "shared" / "sink" / FOLDER / "0")))
    found.about("shop", "sink", 0)
    return found


def values(dead_letters):
    return [dead_letter.record.payload[0] for dead_letter in dead_letters.read_all()]


def test_dead_letters_stay_until_they_are_removed_and_no_id_comes_again(dead_letters):
    dead_letters.add([ReplayRecord((n,), 1, "boom", "sink", 1.0) for n in range(1500)])
    dead_letters.add([ReplayRecord(("last",), 1, "boom", "sink", 1.0)])
    found = dead_letters.read_all()
    assert values(dead_letters) == [*range(1500), "last"]
    assert len({dead_letter.id for dead_letter in found}) == 1501
    dead_letters.remove([dead_letter.id for dead_letter in found if dead_letter.record.payload[0] != 7])
    assert values(dead_letters) == [7]
    dead_letters.remove([dead_letter.id for dead_letter in found])
    assert values(dead_letters) == []
    dead_letters.add([ReplayRecord(("new",), 1, "boom", "sink", 1.0)])
    (new,) = dead_letters.read_all()
    assert new.id > max(dead_letter.id for dead_letter in found)


def test_dlq_lists_shows_and_drops_them_and_says_why_it_cannot_send_them_back(dead_letters, tmp_path, capsys):
    dead_letters.add([ReplayRecord((n, "x"), 1, "never taken", "sink", 1.0) for n in (1, 2)])
    first, second = (f"sink.0.{dead_letter.id}" for dead_letter in dead_letters.read_all())
    place = ["--state-dir", str(tmp_path), "--topology", "shop"]
    assert main(["dlq", "list", *place]) == 0
    said = capsys.readouterr().out
    assert first in said
    assert "never taken" in said
    assert main(["dlq", "show", second, *place]) == 0
    assert "value 0       2" in capsys.readouterr().out
    assert main(["dlq", "send-back", first, *place]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "only dead letters of a ReplaySpout or a PersistBolt can be sent back" in said
    assert "send the rows to the topology's source again" in said
    assert main(["dlq", "drop", first, *place]) == 0
    assert values(dead_letters) == [2]


def test_dead_letters_under_one_name_are_there_once_and_the_last_ones_hold(dead_letters):
    def records(*numbers):
        return [ReplayRecord((n,), 1, "boom", "sink", float(n)) for n in numbers]

    dead_letters.add_once(records(*range(1200)), "task.1")
    dead_letters.add(records(7))
    found = dead_letters.read_all()
    dead_letters.remove([found[3].id])
    later = [record._replace(first_failed=99.0) for record in records(*range(1200))]
    assert dead_letters.add_once(later, "task.1") == 0, "the same, failed again at another time"
    assert [dead_letter.id for dead_letter in dead_letters.read_all()] == [
        dead_letter.id for dead_letter in found if dead_letter.id != found[3].id
    ]
    dead_letters.add_once(records(5), "task.2")
    assert dead_letters.add_once(records(6), "task.2") == 1
    assert sorted(values(dead_letters)) == sorted([*set(range(1200)) - {2}, 7, 6])
    assert dead_letters.add_once([], "task.2") == 0
    assert dead_letters.add_once([], "task.3") == 0
    assert sorted(values(dead_letters)) == sorted([*set(range(1200)) - {2}, 7]), "replaced by none"


def test_of_two_generations_the_newer_ones_dead_letters_hold_whoever_writes_last(dead_letters):
    def of(generation):
        return StateDeadLetterStore(dead_letters._store, generation)

    def records(*numbers):
        return [ReplayRecord((n,), 1, "boom", "sink", 1.0) for n in numbers]

    old, new = of(1), of(2)
    assert old.add_once(records(1, 2), "a.published.7") == 2
    assert new.add_once(records(1, 2), "a.published.7") == 0, "the same: nothing to do"
    assert new.add_once(records(2), "a.published.7") == 1
    assert values(dead_letters) == [2]
    assert old.add_once(records(1, 2, 3), "a.published.7") == 3, "the old one wakes up"
    assert values(dead_letters) == [2]
    assert of(3).add_once([], "a.published.7") == 0
    assert values(dead_letters) == []
    old.add_once(records(4), "a.published.7")
    assert values(dead_letters) == [], "none hold, and the old process cannot change that"


def test_dead_letters_whose_write_was_not_answered_are_there_once(dead_letters, monkeypatch):
    writer, create = StateDeadLetterStore(dead_letters._store, 1), StateStore.create

    def unanswered(self, name, data):
        create(self, name, data)
        raise OSError("no answer")

    with monkeypatch.context() as patch:
        patch.setattr(StateStore, "create", unanswered)
        with pytest.raises(OSError, match="no answer"):
            writer.add_once([ReplayRecord((1,), 1, "boom", "sink", 1.0)], "a.published.1")
    writer.add_once([ReplayRecord((n,), 1, "boom", "sink", 1.0) for n in (1, 2)], "a.published.1")
    assert values(dead_letters) == [1, 2]


def test_a_writer_lists_the_folder_once(dead_letters, monkeypatch):
    writer, listed, list_ = StateDeadLetterStore(dead_letters._store, 1), [], StateStore.list

    def count(self, prefix=""):
        listed.append(prefix)
        return list_(self, prefix)

    monkeypatch.setattr(StateStore, "list", count)
    for epoch in range(200):
        writer.add_once([ReplayRecord((epoch,), 1, "boom", "sink", 1.0)], epoch_dead_letters(epoch, 0))
        writer.add_once([], f"a.published.{epoch}")
    assert listed.count("added/") == 1
    assert len(writer._known) <= 64, "bounded"


def test_send_back_of_all_sends_those_that_have_a_queue_and_says_what_to_do_with_the_others(
    dead_letters, tmp_path, capsys
):
    dead_letters.add([ReplayRecord((1,), 1, "never taken", "sink", 1.0)])
    folder = str(tmp_path / "shop" / "tasks" / "lines-0")
    queues = EmbeddedStore().open(
        Context("shop", "lines", 1, 0, {"lines": (1,)}, delivery="at_least_once", folder=folder)
    )
    queues.dead.add([ReplayRecord((2,), 5, "boom", "count", 1.0)])
    place = ["--state-dir", str(tmp_path), "--topology", "shop"]
    (ours,) = (f"sink.0.{dead_letter.id}" for dead_letter in dead_letters.read_all())
    (theirs,) = (f"lines.0.{dead_letter.id}" for dead_letter in queues.dead.read_all())
    assert main(["dlq", "send-back", theirs, ours, *place]) == 2
    assert "Nothing was changed" in " ".join(capsys.readouterr().err.split())
    assert len(queues.dead.read_all()) == 1
    assert main(["dlq", "send-back", "--all", *place]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "Not sent back: 1 of 'sink', because there is no queue to send them to." in said
    assert "1 dead letter sent back" in said
    assert queues.dead.read_all() == []
    assert values(dead_letters) == [1]
