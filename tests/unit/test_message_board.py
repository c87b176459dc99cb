"""The decisions of the message boards."""

import importlib.util
import math

import pytest

from penstock.control.signals import TaskFlowState, TaskMessage
from penstock.driver.message_board import MessageBoardTables
from penstock.errors import EnvironmentFault, SettingError
from penstock.plan.model import WorkerId
from penstock.protocol import codec
from penstock.protocol.events import JoinMessageBoard
from penstock.protocol.message_board import UnsentMessages, check_message_board, parse_url
from penstock.worker.message_board import open_message_board

A, B, C = WorkerId(0, 0), WorkerId(1, 0), WorkerId(1, 1)
WORKER_OF = {1: A, 2: B, 3: B, 4: C}


def message(source, target, value=0.0, kind="slow"):
    return TaskMessage(source, target, kind, value)


def test_messages_wait_for_the_worker_of_their_target():
    tables = MessageBoardTables(WORKER_OF)
    first, second, other = message(4, 2, 1.0), message(4, 3), message(4, 1)
    for each in (first, second, other):
        assert tables.handle(C, each) == []
    assert tables.handle(B, JoinMessageBoard()) == [(B, first), (B, second)]
    assert tables.handle(C, first) == [(B, first)]
    assert list(tables.messages) == [A]


def test_states_go_to_all_who_have_joined_and_to_those_who_join():
    tables = MessageBoardTables(WORKER_OF)
    tables.handle(A, JoinMessageBoard())
    tables.handle(B, JoinMessageBoard())
    old, new = TaskFlowState(1, "count", 10.0), TaskFlowState(1, "count", math.inf)
    assert sorted(tables.handle(A, old)) == [(A, old), (B, old)]
    tables.handle(A, new)
    assert tables.handle(C, JoinMessageBoard()) == [(C, new)]


def test_a_message_to_nobody_is_logged_and_dropped(caplog):
    tables = MessageBoardTables(WORKER_OF)
    assert tables.handle(A, message(1, 99)) == []
    assert not tables.messages
    assert "worker 0.0 sent a message to task 99, which does not exist" in caplog.text


@pytest.mark.parametrize(
    "sent", [TaskFlowState(3, "count", math.inf), message(1, 2, 3.5, "grant"), TaskFlowState(3, "ü", 0.1)]
)
def test_messages_and_states_survive_the_control_connection(sent):
    assert codec.decode_event(codec.encode(sent)) == sent
    assert codec.decode_command(codec.encode(sent)) == sent


def test_of_too_many_messages_the_newest_of_each_pair_is_kept(caplog):
    waiting = UnsentMessages(most=6)
    for value in range(3):
        waiting.append(message(1, 2, value))
        waiting.append(message(1, 3, value))
    assert len(waiting) == 6
    waiting.append(message(1, 2, 3.0, "cancel"))
    assert waiting.take(10) == [message(1, 3, 2), message(1, 2, 3.0, "cancel")]
    assert "7 task messages wait to be sent; 2 are kept" in caplog.text


def test_many_pairs_are_all_kept():
    waiting = UnsentMessages(most=4)
    for round in range(3):
        for target in range(50):
            waiting.append(message(1, target, round))
    newest = {each.target: each.value for each in waiting.take(1000)}
    assert newest == dict.fromkeys(range(50), 2)


def test_messages_are_taken_oldest_first():
    waiting = UnsentMessages()
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
        open_message_board(url, "run", [1], print, print, None)
    assert str(caught.value) == (
        f"setting flow.board: {url!r} is neither coordinator nor zookeeper://host:port[,host:port]/path. "
        "For example zookeeper://127.0.0.1:2181/penstock."
    )


def test_without_kazoo_it_says_what_to_install(monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "kazoo" else found(name))
    with pytest.raises(EnvironmentFault) as caught:
        open_message_board("zookeeper://a:1/x", "run", [1], print, print, None)
    assert str(caught.value) == (
        "message board zookeeper://a:1/x: the package kazoo is not installed. "
        'Install it with: pip install "penstock[zookeeper]".'
    )


def test_credits_need_the_coordinators_board():
    with pytest.raises(
        SettingError, match=r"credit mode sends grants many times.*flow\.mode=step, or flow\.board=coordinator"
    ):
        check_message_board("zookeeper://a:1/x", "credit")
    check_message_board("coordinator", "credit")


def test_what_comes_while_a_worker_changes_its_process_waits_for_the_next():
    tables = MessageBoardTables({1: WorkerId(0, 0), 2: WorkerId(1, 0)})
    tables.handle(WorkerId(1, 0), JoinMessageBoard())
    message = TaskMessage(1, 2, "cancel", 0.0)
    assert tables.handle(WorkerId(0, 0), message) == [(WorkerId(1, 0), message)]
    tables.detach(WorkerId(1, 0))
    assert tables.handle(WorkerId(0, 0), message) == []
    assert tables.handle(WorkerId(1, 0), JoinMessageBoard()) == [(WorkerId(1, 0), message)]
    assert tables.handle(WorkerId(0, 0), message) == [(WorkerId(1, 0), message)]


@pytest.mark.parametrize(("kind", "value"), [("slow", 2.0), ("grant", 90.0), ("hold", 0.0)])
def test_compaction_keeps_a_proceed_that_other_messages_follow(kind, value):
    waiting = UnsentMessages(most=4)
    waiting.append(message(1, 2, kind="wait"))
    waiting.append(message(1, 2, kind="proceed"))
    for _ in range(3):
        waiting.append(message(1, 2, value, kind))
    assert waiting.take(10) == [message(1, 2, kind="proceed"), message(1, 2, value, kind)]
