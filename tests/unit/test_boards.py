"""The decisions of the message boards."""

import importlib.util
import math

import pytest

from penstock.control.signals import TaskMessage, TaskState
from penstock.coordinator.boards import Boards, Waiting, check_board, open_board, parse_url
from penstock.coordinator.messages import JoinBoards, dumps, loads
from penstock.errors import EnvironmentFault, SettingError
from penstock.plan.model import SlotId

A, B, C = SlotId(0, 0), SlotId(1, 0), SlotId(1, 1)
SLOT_OF = {1: A, 2: B, 3: B, 4: C}


def message(source, target, value=0.0, kind="slow"):
    return TaskMessage(source, target, kind, value)


def test_messages_wait_for_the_slot_of_their_target():
    boards = Boards(SLOT_OF)
    first, second, other = message(4, 2, 1.0), message(4, 3), message(4, 1)
    for each in (first, second, other):
        assert boards.take(C, each) == []
    assert boards.take(B, JoinBoards()) == [(B, first), (B, second)]
    assert boards.take(C, first) == [(B, first)]
    assert list(boards.messages) == [A]


def test_states_go_to_all_who_have_joined_and_to_those_who_join():
    boards = Boards(SLOT_OF)
    boards.take(A, JoinBoards())
    boards.take(B, JoinBoards())
    old, new = TaskState(1, "count", 10.0), TaskState(1, "count", math.inf)
    assert sorted(boards.take(A, old)) == [(A, old), (B, old)]
    boards.take(A, new)
    assert boards.take(C, JoinBoards()) == [(C, new)]


def test_a_message_to_nobody_is_logged_and_dropped(caplog):
    boards = Boards(SLOT_OF)
    assert boards.take(A, message(1, 99)) == []
    assert not boards.messages
    assert "slot 0.0 posted to task 99, which does not exist" in caplog.text


@pytest.mark.parametrize(
    "sent", [TaskState(3, "count", math.inf), message(1, 2, 3.5, "grant"), TaskState(3, "ü", 0.1)]
)
def test_messages_and_states_survive_the_control_connection(sent):
    assert loads(dumps(sent)) == sent


def test_of_too_many_messages_the_newest_of_each_pair_is_kept(caplog):
    waiting = Waiting(most=6)
    for value in range(3):
        waiting.append(message(1, 2, value))
        waiting.append(message(1, 3, value))
    assert len(waiting) == 6
    waiting.append(message(1, 2, 3.0, "cancel"))
    assert waiting.take(10) == [message(1, 3, 2), message(1, 2, 3.0, "cancel")]
    assert "7 task messages cannot be sent; 2 are kept" in caplog.text


def test_many_pairs_are_all_kept():
    waiting = Waiting(most=4)
    for round in range(3):
        for target in range(50):
            waiting.append(message(1, target, round))
    newest = {each.target: each.value for each in waiting.take(1000)}
    assert newest == dict.fromkeys(range(50), 2)


def test_messages_are_taken_oldest_first():
    waiting = Waiting()
    for value in range(5):
        waiting.append(message(1, 2, value))
    assert [each.value for each in waiting.take(2)] == [0, 1]
    assert [each.value for each in waiting.take(9)] == [2, 3, 4]
    assert not waiting


def test_urls_of_boards():
    assert parse_url("zookeeper://a:2181/penstock") == ("a:2181", "/penstock")
    assert parse_url("zookeeper://a:1,[::1]:2/x/y/") == ("a:1,[::1]:2", "/x/y")


@pytest.mark.parametrize(
    "url",
    [
        "",
        "zookeeper",
        "redis://a:1/x",
        "zookeeper://a:1",
        "zookeeper://a:1/",
        "zookeeper://a/x",
        "zookeeper://:1/x",
        "zookeeper://a:1,/x",
        "zookeeper://a:70000/x",
        "zookeeper://a:1/x//y",
        "zookeeper://a:1/../x",
    ],
)
def test_other_urls_are_refused(url):
    with pytest.raises(SettingError) as caught:
        open_board(url, "run", [1], print, print, None)
    assert str(caught.value) == (
        "setting board: must be coordinator or zookeeper://host:port[,host:port]/path; "
        f"got {url!r}. An example: zookeeper://127.0.0.1:2181/penstock"
    )


def test_without_kazoo_it_says_what_to_install(monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "kazoo" else found(name))
    with pytest.raises(EnvironmentFault) as caught:
        open_board("zookeeper://a:1/x", "run", [1], print, print, None)
    assert str(caught.value) == (
        "board zookeeper://a:1/x: the package kazoo talks to ZooKeeper, but it is not installed. "
        'Install it with: pip install "penstock[zookeeper]".'
    )


def test_credits_need_the_coordinators_board():
    with pytest.raises(SettingError, match=r"credit grants many times a second.*flow=step, or board=coordinator"):
        check_board("zookeeper://a:1/x", "credit")
    check_board("coordinator", "credit")


def test_what_comes_while_a_slot_changes_its_process_waits_for_the_next():
    boards = Boards({1: SlotId(0, 0), 2: SlotId(1, 0)})
    boards.take(SlotId(1, 0), JoinBoards())
    message = TaskMessage(1, 2, "cancel", 0.0)
    assert boards.take(SlotId(0, 0), message) == [(SlotId(1, 0), message)]
    boards.leave(SlotId(1, 0))
    assert boards.take(SlotId(0, 0), message) == []
    assert boards.take(SlotId(1, 0), JoinBoards()) == [(SlotId(1, 0), message)]
    assert boards.take(SlotId(0, 0), message) == [(SlotId(1, 0), message)]


@pytest.mark.parametrize(("kind", "value"), [("slow", 2.0), ("grant", 90.0), ("hold", 0.0)])
def test_compaction_keeps_a_proceed_that_other_messages_follow(kind, value):
    waiting = Waiting(most=4)
    waiting.append(message(1, 2, kind="wait"))
    waiting.append(message(1, 2, kind="proceed"))
    for _ in range(3):
        waiting.append(message(1, 2, value, kind))
    assert waiting.take(10) == [message(1, 2, kind="proceed"), message(1, 2, value, kind)]
