"""Dead letters of sinks and plain spouts: kept in the state directory, shown by ``penstock dlq``."""

from __future__ import annotations

import pytest

from penstock.cli.main import main
from penstock.replay.records import Record
from penstock.replay.stored_letters import FOLDER, StoredLetters
from penstock.state.store import StateStore


@pytest.fixture
def letters(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    found = StoredLetters(StateStore(str(tmp_path / "shop" / "shared" / "sink" / FOLDER / "0")))
    found.about("shop", "sink", 0)
    return found


def values(letters):
    return [letter.record.payload[0] for letter in letters.letters()]


def test_letters_stay_until_they_are_removed_and_no_id_comes_again(letters):
    letters.add([Record((n,), 1, "boom", "sink", 1.0) for n in range(1500)])
    letters.add([Record(("last",), 1, "boom", "sink", 1.0)])
    found = letters.letters()
    assert values(letters) == [*range(1500), "last"]
    assert len({letter.id for letter in found}) == 1501
    letters.remove([letter.id for letter in found if letter.record.payload[0] != 7])
    assert values(letters) == [7]
    letters.remove([letter.id for letter in found])
    assert values(letters) == []
    letters.add([Record(("new",), 1, "boom", "sink", 1.0)])
    (new,) = letters.letters()
    assert new.id > max(letter.id for letter in found)


def test_dlq_lists_shows_and_drops_them_and_says_why_it_cannot_send_them_back(letters, tmp_path, capsys):
    letters.add([Record((n, "x"), 1, "never taken", "sink", 1.0) for n in (1, 2)])
    first, second = (f"sink.0.{letter.id}" for letter in letters.letters())
    place = ["--state-dir", str(tmp_path), "--topology", "shop"]
    assert main(["dlq", "list", *place]) == 0
    said = capsys.readouterr().out
    assert first in said
    assert "never taken" in said
    assert main(["dlq", "show", second, *place]) == 0
    assert "value 0       2" in capsys.readouterr().out
    assert main(["dlq", "send-back", first, *place]) == 2
    assert "only letters of a ReplaySpout or a PersistBolt can be sent back" in capsys.readouterr().err
    assert main(["dlq", "drop", first, *place]) == 0
    assert values(letters) == [2]


def test_letters_under_one_name_are_there_once_and_the_last_ones_hold(letters):
    def records(*numbers):
        return [Record((n,), 1, "boom", "sink", float(n)) for n in numbers]

    letters.add_once(records(*range(1200)), "task.1")
    letters.add(records(7))
    found = letters.letters()
    letters.remove([found[3].id])
    later = [record._replace(first_failed=99.0) for record in records(*range(1200))]
    assert letters.add_once(later, "task.1") == 0, "the same, failed again at another time"
    assert [letter.id for letter in letters.letters()] == [
        letter.id for letter in found if letter.id != found[3].id
    ]
    letters.add_once(records(5), "task.2")
    assert letters.add_once(records(6), "task.2") == 1
    assert values(letters)[-2:] == [7, 6]
