"""What every message board keeps, and what the one on ZooKeeper survives."""

import itertools
import math
import threading
import time

import pytest
from kazoo.client import KazooClient
from kazoo.exceptions import NoNodeError
from kazoo.retry import KazooRetry

from penstock import make_plan
from penstock.control.signals import TaskFlowState, TaskMessage
from penstock.driver.coordinator import Coordinator
from penstock.metrics.bus import MetricsBus
from penstock.protocol.client import ControlClient
from penstock.protocol.events import Hello
from penstock.testing import CaptureBolt, FeederSpout
from penstock.worker import zookeeper_board as zookeeper_module
from penstock.worker.message_board import open_message_board
from penstock.worker.zookeeper_board import ZooKeeperMessageBoard
from tests.helpers import Pass, line_topology

PATIENCE = 30.0  # seconds; a loaded machine
_numbers = itertools.count(1)


def wait_until(condition):
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.005)


class Slot:
    """One worker's board, and what came from it."""

    def __init__(self, tasks):
        self.tasks, self.messages, self.states = tuple(tasks), [], []
        self.board = self.close = None

    def post(self, target, value, kind="slow", source=None):
        self.board.post(TaskMessage(self.tasks[0] if source is None else source, target, kind, float(value)))

    def values(self, source, target=None):
        """What came from a task, in the order it came."""
        target = self.tasks[0] if target is None else target
        return [each.value for each in self.messages if (each.source, each.target) == (source, target)]

    def newest(self):
        return {(state.task, state.towards): state.rate for state in self.states}


class InCoordinator:
    """A real coordinator, and real control connections to it."""

    def __init__(self):
        self.plan = make_plan(line_topology(FeederSpout("x"), Pass("x"), CaptureBolt(), parallelism=2))
        self.workers = self.plan.worker_ids()
        self.coordinator = Coordinator()
        self.coordinator.start()
        self.registry = self.begin(0)
        self._held = threading.Event()
        self._slots = []

    def begin(self, attempt):
        return self.coordinator.begin(attempt, self.plan, MetricsBus(self.plan), 0)

    def task(self, number):
        """The one task of the worker of this number."""
        (task,) = self.plan.routes.tasks_of(self.workers[number])
        return task

    def open(self, number):
        """The board of the worker of this number."""
        worker = self.workers[number]
        control = ControlClient(self.coordinator.address, self.coordinator.secret, lambda: None)
        control.send(Hello(worker.stage, worker.index, self.registry.attempt, 0, "here"))
        slot = Slot([self.task(number)])
        slot.board = open_message_board(
            "coordinator", "run", slot.tasks, slot.messages.append, slot.states.append, control
        )

        def close():
            slot.board.close()
            control.close()

        slot.close = close
        self._slots.append(slot)
        return slot

    def left(self):
        """Messages on the board."""
        return sum(map(len, self.registry._message_board.messages.values()))

    def hold(self):
        """Let the board answer nobody."""
        self._held.clear()
        self.coordinator._loop.call_soon_threadsafe(self._held.wait)

    def release(self):
        self._held.set()

    def close(self):
        self._held.set()
        for slot in self._slots:
            slot.close()
        self.coordinator.stop()


class OnZooKeeper:
    """A run of its own on a real ZooKeeper."""

    def __init__(self, server):
        self.server = server
        self.path = "/penstock/boards"
        self.run = f"run-{next(_numbers)}"
        self.client = KazooClient(server.address, 2.0, connection_retry=KazooRetry(max_tries=-1, max_delay=0.5))
        self.client.start()
        self._slots = []

    def task(self, number):
        return number + 1

    def open(self, number, session=None):
        slot = Slot([self.task(number)])
        if session is None:
            url = f"zookeeper://{self.server.address}{self.path}"
            slot.board = open_message_board(
                url, self.run, slot.tasks, slot.messages.append, slot.states.append, control=None
            )
        else:
            slot.board = ZooKeeperMessageBoard(
                self.server.address, self.root, slot.tasks, slot.messages.append, slot.states.append, session
            )
        slot.close = slot.board.close
        self._slots.append(slot)
        return slot

    @property
    def root(self):
        return f"{self.path}/{self.run}"

    def children(self, path):
        try:
            return self.client.retry(self.client.get_children, self.root + path)
        except NoNodeError:
            return []

    def left(self):
        return sum(len(self.children(f"/taskmessage/{task}")) for task in self.children("/taskmessage"))

    def hold(self):
        self.server.pause()

    def release(self):
        self.server.resume()

    def close(self):
        self.server.resume()
        for slot in self._slots:
            slot.close()
        self.client.stop()
        self.client.close()


@pytest.fixture
def zookeeper(zookeeper_server):
    zookeeper_server.start()
    world = OnZooKeeper(zookeeper_server)
    yield world
    zookeeper_server.start()
    world.close()


@pytest.fixture(params=["coordinator", "zookeeper"])
def world(request):
    if request.param == "zookeeper":
        yield request.getfixturevalue("zookeeper")
    else:
        world = InCoordinator()
        yield world
        world.close()


# ---- messages --------------------------------------------------------------------------------------------


def test_messages_of_several_workers_come_once_and_in_order(world):
    count = 200
    receivers, senders = [world.open(0), world.open(1)], [world.open(number) for number in (2, 3, 4)]

    def send(slot):
        for value in range(count):
            for receiver in receivers:
                slot.post(receiver.tasks[0], value)

    threads = [threading.Thread(target=send, args=(slot,)) for slot in senders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wait_until(lambda: all(len(receiver.messages) >= count * len(senders) for receiver in receivers))
    wait_until(lambda: world.left() == 0)
    for receiver in receivers:
        for sender in senders:
            assert receiver.values(sender.tasks[0]) == list(range(count))
        assert len(receiver.messages) == count * len(senders)
    assert not any(sender.messages for sender in senders)


def test_all_parts_of_a_message_arrive(world):
    receiver, sender = world.open(0), world.open(2)
    messages = [
        TaskMessage(sender.tasks[0], receiver.tasks[0], kind, value)
        for kind, value in [("slow", 1.0), ("cancel", 0.0), ("hold", 0.0), ("grant", 1e16), ("grant", 1e-7)]
    ]
    for message in messages:
        sender.board.post(message)
    wait_until(lambda: len(receiver.messages) == len(messages))
    assert receiver.messages == messages


def test_messages_wait_for_their_receiver_and_are_deleted_when_it_has_them(world):
    sender, target = world.open(2), world.task(0)
    for value in range(3):
        sender.post(target, value)
    wait_until(lambda: world.left() == 3)
    receiver = world.open(0)
    wait_until(lambda: len(receiver.messages) == 3)
    assert receiver.values(sender.tasks[0]) == [0, 1, 2]
    wait_until(lambda: world.left() == 0)


def test_a_task_can_send_to_one_of_its_own_worker(world):
    slot = world.open(0)
    slot.post(slot.tasks[0], 7)
    wait_until(lambda: slot.values(slot.tasks[0]) == [7])


def test_posting_never_waits_for_the_board(world):
    count = 5_000  # more than sockets take on their own
    receiver, sender = world.open(0), world.open(2)
    sender.post(receiver.tasks[0], -1)
    wait_until(lambda: receiver.messages)
    world.hold()

    def send():
        for value in range(count):
            sender.post(receiver.tasks[0], value)
            sender.board.publish(TaskFlowState(sender.tasks[0], "b1", float(value)))

    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    assert not thread.is_alive()
    assert receiver.values(sender.tasks[0]) == [-1]
    world.release()
    wait_until(lambda: len(receiver.messages) >= count + 1)
    wait_until(lambda: receiver.newest().get((sender.tasks[0], "b1")) == count - 1)
    assert receiver.values(sender.tasks[0]) == list(range(-1, count))


def test_the_next_start_has_boards_of_its_own():
    world = InCoordinator()
    sender, target = world.open(2), world.task(0)
    sender.post(target, 1)
    sender.board.publish(TaskFlowState(target, "b1", 1.0))
    wait_until(lambda: world.left() == 1)
    world.coordinator.end(world.registry)
    world.registry = world.begin(1)
    receiver, sender = world.open(0), world.open(2)
    sender.post(target, 2)
    wait_until(lambda: receiver.messages)
    assert receiver.values(sender.tasks[0]) == [2]
    assert not receiver.states
    world.close()


# ---- states ----------------------------------------------------------------------------------------------


def test_states_are_seen_by_all(world):
    slots = [world.open(number) for number in range(3)]
    states = {
        (slots[0].tasks[0], "b1"): 1.5,
        (slots[0].tasks[0], "a/b c"): math.inf,
        (slots[1].tasks[0], "b1"): 0.0,
    }
    for (task, towards), rate in states.items():
        next(slot for slot in slots if task in slot.tasks).board.publish(TaskFlowState(task, towards, rate))
    for slot in slots:
        wait_until(lambda slot=slot: slot.newest() == states)
    late = world.open(4)
    wait_until(lambda: late.newest() == states)


def test_the_newest_state_wins(world):
    slot, other = world.open(0), world.open(1)
    for rate in range(500):
        slot.board.publish(TaskFlowState(slot.tasks[0], "b1", float(rate)))
    wait_until(lambda: other.newest() == {(slot.tasks[0], "b1"): 499.0})
    rates = [state.rate for state in other.states]
    assert rates == sorted(rates)
    late = world.open(4)
    wait_until(lambda: late.states)
    assert [state.rate for state in late.states] == [499.0]


# ---- the end ---------------------------------------------------------------------------------------------


def test_a_closed_board_is_silent_and_leaves_no_thread(world):
    before = set(threading.enumerate())
    closed, other = world.open(0), world.open(1)
    other.post(closed.tasks[0], 1)
    closed.board.publish(TaskFlowState(closed.tasks[0], "b1", 1.0))
    wait_until(lambda: closed.messages and other.states)
    closed.board.close()
    other.post(closed.tasks[0], 2)
    other.board.publish(TaskFlowState(other.tasks[0], "b2", 1.0))
    wait_until(lambda: (other.tasks[0], "b2") in other.newest())
    closed.close()
    other.close()
    wait_until(lambda: set(threading.enumerate()) <= before)
    assert closed.values(other.tasks[0]) == [1]
    assert (other.tasks[0], "b2") not in closed.newest()


def test_what_was_posted_before_the_end_is_sent(world):
    receiver, sender = world.open(0), world.open(2)
    sender.post(receiver.tasks[0], -1)
    wait_until(lambda: receiver.messages)  # it is connected
    for value in range(250):
        sender.post(receiver.tasks[0], value)
    sender.close()
    wait_until(lambda: len(receiver.messages) == 251)


def test_the_last_to_leave_removes_the_run(zookeeper):
    slots = [zookeeper.open(0), zookeeper.open(1)]
    slots[0].post(slots[1].tasks[0], 1)
    slots[0].board.publish(TaskFlowState(slots[0].tasks[0], "b1", 1.0))
    wait_until(lambda: slots[1].messages and slots[1].states)
    slots[0].close()
    assert zookeeper.children("/members")
    assert not zookeeper.children("/taskstate")
    slots[1].close()
    assert zookeeper.client.exists(zookeeper.root) is None


def test_a_worker_that_moved_leaves_the_board_to_who_has_its_tasks_now(zookeeper):
    sender, old = zookeeper.open(0), zookeeper.open(1)
    old.board.publish(TaskFlowState(old.tasks[0], "sink", 10.0))
    sender.post(old.tasks[0], 1)
    wait_until(lambda: old.values(1) == [1.0] and sender.newest() == {(2, "sink"): 10.0})
    new = zookeeper.open(1)
    new.board.publish(TaskFlowState(new.tasks[0], "sink", 20.0))
    wait_until(lambda: sender.newest() == {(2, "sink"): 20.0})
    old.board.close(moved=True)
    for value in (2, 3):
        sender.post(new.tasks[0], value)
    wait_until(lambda: new.values(1)[-2:] == [2.0, 3.0])
    new.board.publish(TaskFlowState(new.tasks[0], "sink", 30.0))
    wait_until(lambda: sender.newest() == {(2, "sink"): 30.0})


def test_old_runs_are_removed_by_a_new_one(zookeeper, monkeypatch):
    monkeypatch.setattr(zookeeper_module, "OLD_SECONDS", 0.0)
    client = zookeeper.client
    mark = b"penstock run"
    client.create(f"{zookeeper.path}/over/taskmessage/1/x", mark, makepath=True)
    client.set(f"{zookeeper.path}/over", mark)
    client.create(f"{zookeeper.path}/alive/members/one", makepath=True)
    client.set(f"{zookeeper.path}/alive", mark)
    client.create(f"{zookeeper.path}/strangers/treasure", makepath=True)
    zookeeper.open(0)
    wait_until(lambda: zookeeper.children("/members"))  # it joins when it has looked
    assert client.exists(f"{zookeeper.path}/over") is None
    assert client.exists(f"{zookeeper.path}/alive/members/one")
    assert client.exists(f"{zookeeper.path}/strangers/treasure")
    monkeypatch.undo()
    for name in ("alive", "strangers"):
        client.delete(f"{zookeeper.path}/{name}", recursive=True)


# ---- what ZooKeeper does to its clients ------------------------------------------------------------------


def test_a_lost_session(zookeeper):
    receiver, sender = zookeeper.open(0), zookeeper.open(2)
    sender.post(receiver.tasks[0], 0)
    wait_until(lambda: receiver.messages)
    wait_until(lambda: len(zookeeper.children("/members")) == 2)
    for round, slot in enumerate([receiver, sender, receiver]):
        session = slot.board._client.client_id
        double = KazooClient(zookeeper.server.address, client_id=session)
        double.start()
        double.stop()  # ends the session they share
        double.close()
        sender.post(receiver.tasks[0], round + 1)
        sender.board.publish(TaskFlowState(sender.tasks[0], "b1", float(round)))
        wait_until(lambda: len(receiver.messages) >= round + 2)  # noqa: B023
        wait_until(lambda: receiver.newest() == {(sender.tasks[0], "b1"): round})  # noqa: B023
        wait_until(lambda: slot.board._client.client_id not in (None, session))  # noqa: B023
        wait_until(lambda: len(zookeeper.children("/members")) == 2)
    assert receiver.values(sender.tasks[0]) == [0, 1, 2, 3]
    wait_until(lambda: zookeeper.left() == 0)


@pytest.mark.parametrize("clean", [True, False])
def test_a_restarted_server(zookeeper, clean):
    receiver, sender = zookeeper.open(0), zookeeper.open(2)
    values = iter(range(10_000))
    posted, stop = [], threading.Event()

    def send():
        while not stop.wait(0.001):
            posted.append(next(values))
            sender.post(receiver.tasks[0], posted[-1])

    thread = threading.Thread(target=send)
    thread.start()
    wait_until(lambda: len(receiver.messages) > 20)
    zookeeper.server.stop() if clean else zookeeper.server.kill()
    early = zookeeper.open(1)  # its server is not there yet
    gone = len(posted)
    sender.board.publish(TaskFlowState(sender.tasks[0], "b1", 5.0))
    wait_until(lambda: len(posted) > gone + 200)
    zookeeper.server.start()
    stop.set()
    thread.join()
    sender.post(early.tasks[0], 1)
    wait_until(lambda: len(receiver.messages) >= len(posted))
    wait_until(lambda: early.messages and early.newest() == receiver.newest() != {})
    wait_until(lambda: zookeeper.left() == 0)
    assert receiver.values(sender.tasks[0]) == posted


def test_a_server_that_hangs_for_longer_than_a_session(zookeeper):
    receiver, sender = zookeeper.open(0, session=1.5), zookeeper.open(2, session=1.5)
    sender.post(receiver.tasks[0], 0)
    sender.board.publish(TaskFlowState(sender.tasks[0], "b1", 0.0))
    wait_until(lambda: receiver.messages and receiver.states)
    zookeeper.server.pause()
    for value in range(1, 150):
        sender.post(receiver.tasks[0], value)
        sender.board.publish(TaskFlowState(sender.tasks[0], "b1", float(value)))
    wait_until(lambda: not (sender.board._client.connected or receiver.board._client.connected))
    zookeeper.server.resume()
    wait_until(lambda: len(receiver.messages) >= 150)
    wait_until(lambda: receiver.newest() == {(sender.tasks[0], "b1"): 149.0})
    wait_until(lambda: zookeeper.left() == 0)
    assert receiver.values(sender.tasks[0]) == list(range(150))


def test_a_create_whose_answer_was_lost(zookeeper):
    sender, target = zookeeper.open(2, session=1.5), zookeeper.task(0)
    sender.post(target, 0)
    wait_until(lambda: zookeeper.left() == 1)
    zookeeper.server.pause()
    sender.post(target, 1)
    wait_until(lambda: not sender.board._client.connected)
    zookeeper.server.resume()  # it finds the create of the old connection, and then that of the new one
    sender.post(target, 2)
    wait_until(lambda: zookeeper.left() == 3)
    receiver = zookeeper.open(0)
    wait_until(lambda: zookeeper.left() == 0)
    assert receiver.values(sender.tasks[0]) == [0, 1, 2]


def test_a_message_created_twice_is_received_once(zookeeper):
    sender, target = zookeeper.open(2), zookeeper.task(0)
    sender.post(target, 1)
    wait_until(lambda: zookeeper.left() == 1)
    (name,) = zookeeper.children(f"/taskmessage/{target}")
    receiver = zookeeper.open(0)
    wait_until(lambda: receiver.messages and zookeeper.left() == 0)
    zookeeper.client.create(f"{zookeeper.root}/taskmessage/{target}/{name}")  # a create that was held up
    sender.post(target, 2)
    wait_until(lambda: len(receiver.messages) >= 2 and zookeeper.left() == 0)
    assert receiver.values(sender.tasks[0]) == [1, 2]


def test_a_state_that_came_from_elsewhere_is_replaced(zookeeper):
    """As after a set whose answer was lost: the version is not the one the board knows."""
    slot = zookeeper.open(0)
    slot.board.publish(TaskFlowState(slot.tasks[0], "b1", 1.0))
    wait_until(lambda: slot.newest() == {(slot.tasks[0], "b1"): 1.0})
    zookeeper.client.set(f"{zookeeper.root}/taskstate/{slot.tasks[0]}-b1", b'[1, "b1", 7.0]')
    wait_until(lambda: slot.states[-1].rate == 7.0)
    slot.board.publish(TaskFlowState(slot.tasks[0], "b1", 2.0))
    wait_until(lambda: slot.newest() == {(slot.tasks[0], "b1"): 2.0})


def test_closing_while_the_server_hangs_or_is_gone(zookeeper):
    before = set(threading.enumerate())
    one, other = zookeeper.open(0, session=1.5), zookeeper.open(1, session=1.5)
    one.post(other.tasks[0], 1)
    other.post(one.tasks[0], 1)
    wait_until(lambda: one.messages and other.messages)
    zookeeper.server.pause()
    one.post(other.tasks[0], 2)
    other.post(one.tasks[0], 2)
    wait_until(
        lambda: one.board._client._pending and other.board._client._pending
    )  # waits for the server's answer
    began = time.monotonic()
    one.close()
    assert time.monotonic() - began < PATIENCE / 3
    zookeeper.server.kill()
    wait_until(lambda: other.board._client._queue)  # tries again, and waits for a connection
    other.close()
    wait_until(lambda: set(threading.enumerate()) <= before)
