"""The messages between driver and workers: what is encoded comes back, and nothing else is accepted."""

import json
import struct
from typing import get_args

import msgspec
import numpy as np
import pytest

from penstock.control.flow_states import DetectorState, LimiterState
from penstock.control.signals import TaskFlowState, TaskMessage
from penstock.errors import ComponentError, ControlRefused
from penstock.metrics.histogram import Histogram
from penstock.metrics.stats import TaskStats
from penstock.plan.owners import OwnerRule
from penstock.protocol import codec, commands, events, wire
from penstock.protocol.handover import FlowHandover, HandoverState, TaskHandover
from penstock.protocol.requests import OperatorAnswer, OperatorRequest
from penstock.protocol.task_states import InheritedTask, OvertakenTuples, SavedTask, WaitingTuples
from penstock.state.snapshots import SnapshotPart
from penstock.worker.archive import _as_json

PART = SnapshotPart("snapshots/a.bin", 0, 10, "00ff", "full", 3)
STATS = TaskStats(executed=7, busy=0.25, latency=Histogram({60: 3}), lag={"p0": 12})
HANDOVER = HandoverState(
    4,
    17,
    [(1, 2, 30, 400)],
    [(1, 2, 0, 9)],
    [(1, 0, 2, 5, {2: 3, 3: 2})],
    FlowHandover(
        {2: DetectorState(steps=1, rate=10.0, credits=[(1, 2, 3)])},
        {2: {"count": LimiterState(paused_by=[3], initial=5.0, steps={4: 1})}},
        [(2, 1)],
    ),
    {2: TaskHandover(STATS, 5, [(1, 0, 9)], (30, 400))},
)
STATES = {
    "count/0": SavedTask({"counts": [PART]}, '[{"any": [1, "value"]}]'),
    "sum/1": InheritedTask(2, 3, OwnerRule(fields=1), {0: {"sums": [PART]}}),
}
COMMANDS = [
    commands.DriverTime(1.5, 2.5),
    commands.AssignWorker(1, [[0], [1, 3]], takes_over=True),
    commands.RouteWorker(1, [1, 3]),
    commands.PrepareToLeave(3, 7),
    commands.CancelLeave(),
    commands.PrefetchState(3, STATES),
    commands.OpenTasks({"0.0": "host/1"}, 2, 3, STATES, HANDOVER),
    commands.RootsSettled(1, "", "", b"\x00\x01"),
    commands.StartAcker(2, 3, 4),
    commands.StopAcker(2, 3),
    commands.UseAcker(2, 3, "127.0.0.1", 4000),
    commands.FailRoots(2),
    commands.OpenTasks({}, 2, 3, STATES, waiting=WaitingTuples([("a/0", PART)], {"a": 1}, [0, -1], {1: "a/0"})),
    commands.EndEpoch(3, last=True),
    commands.EndEpoch(3, overtakes=True),
    commands.TakeSnapshot(3, "spouts"),
    commands.EpochCommitted(3),
    commands.SetMigrationRoutes("count", {4: 5}, 2),
    commands.ProbeLinks(),
    commands.SetSpoutRate("words", float("inf")),
    commands.HoldTimeouts(True),
    commands.ActivateSpouts(),
    commands.DeactivateSpouts(),
    commands.HandOnUnfinished(),
    commands.StopTicks(),
    commands.RequestReport(9),
    commands.CloseTasks(),
    TaskMessage(1, 2, "slow", 3.0),
    TaskFlowState(1, "count", 4.0),
]
EVENTS = [
    events.Hello(1, 0, 0, 4242, "host/1"),
    events.AskDriverTime(1.5),
    events.TasksOpened(True),
    events.ChannelsWarm(),
    events.StatePrefetched(3),
    events.WorkerReport(
        1, 2, 3, 4.0, 5, {1: STATS}, {1: [["a", 1]]}, ["error"], [(1, "a", "b", 2, 3)], 4, [(1, 2, 3, 4)],
        {"id": "x", "cores": 2, "jvm": [1, 2.5, 3]}, 0.1, {1: 7},
    ),
    events.Heartbeat(3, 12.5),
    events.WorkerFailed("worker 0.0", "it broke", "Mend it.", passing=True),
    events.StateUnreadable("no such file"),
    events.AckTally(b"\x01\x02"),
    events.RootsFailed([1 << 63], [1], "count", "boom", 2),
    events.SpoutProgress({1: 4_000}),
    events.JoinAcker(1, 2, 3),
    events.AckerLinked(2, 3, "connection refused"),
    events.AckerStarted(1, 2, 3, 4242, "host/1", "127.0.0.1", 4000),
    events.AckerReport(10, 1_000, 2.5, 50_000_000),
    events.UnfinishedHandedOn(3),
    events.SpoutsSnapshotted(3),
    events.SnapshotWritten(3, {"count/0": STATES["count/0"]}),
    events.SnapshotWritten(3, {}, {"a/0": OvertakenTuples([PART], [1])}),
    events.SnapshotFailed(3, "disk full"),
    events.EpochPublished(3),
    events.WorkerRouted(1, [1, 3]),
    events.LeavePrepared(3),
    events.WorkerLeft(HANDOVER),
    events.SlotFreed(),
    events.JoinMessageBoard(),
    events.TasksClosed(),
    TaskMessage(1, 2, "slow", 3.0),
    TaskFlowState(1, "count", 4.0),
]  # fmt: skip


def test_the_lists_above_have_every_message():
    assert {type(each) for each in COMMANDS} == set(get_args(commands.Command))
    assert {type(each) for each in EVENTS} == set(get_args(events.Event))


@pytest.mark.parametrize("command", COMMANDS, ids=lambda each: type(each).__name__)
def test_commands_survive_the_wire(command):
    assert codec.decode_command(codec.encode(command)) == command


@pytest.mark.parametrize("event", EVENTS, ids=lambda each: type(each).__name__)
def test_events_survive_the_wire(event):
    assert codec.decode_event(codec.encode(event)) == event


def test_requests_and_answers_survive_the_wire():
    request, answer = (
        OperatorRequest("scale", {"count": 4}),
        OperatorAnswer("done", ["where", "what", ""], "StateError"),
    )
    assert codec.decode_event(codec.encode(request)) == request
    assert codec.decode_answer(codec.encode(answer)) == answer


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x80",
        msgspec.msgpack.encode(["Hello", "one", 0, 0, 1, "here"]),
        msgspec.msgpack.encode(["TasksOpened", 3]),
        msgspec.msgpack.encode(["EpochCommitted", 3]),
        msgspec.msgpack.encode(["NoSuchThing"]),
        codec.encode(events.Hello(1, 0, 0, 4242, "host/1"))[:-3],
    ],
    ids=["nothing", "a map", "a text for a number", "a number for a flag", "a command", "unknown", "cut short"],
)
def test_what_is_no_event_is_refused(data):
    with pytest.raises(ControlRefused, match="a message does not follow the protocol"):
        codec.decode_event(data)


def test_a_value_of_the_users_that_messagepack_does_not_know_is_sent_as_text():
    report = events.WorkerReport(0, 0, 0, 0.0, 0, {}, {1: [[1 + 2j]]})
    assert codec.decode_event(codec.encode(report)).published == {1: [["(1+2j)"]]}


def test_a_value_that_cannot_be_written_is_refused():
    with pytest.raises(ControlRefused, match="WorkerReport cannot be sent"):
        codec.encode(events.WorkerReport(0, 0, 0, 0.0, 0, {}, {1: [[1 << 70]]}))


# ---- the handshake -------------------------------------------------------------------------------------


def test_both_ends_prove_that_they_know_the_secret():
    secret, theirs, mine = wire.new_secret(), wire.new_nonce(), wire.new_nonce()
    assert wire.read_greeting(wire.greeting(theirs)) == theirs
    assert wire.read_answer(wire.answer(secret, theirs, mine), secret, theirs) == mine
    wire.check_driver_proof(wire.driver_proof(secret, theirs, mine), secret, theirs, mine)
    with pytest.raises(ControlRefused, match="does not know the secret"):
        wire.read_answer(wire.answer(b"wrong", theirs, mine), secret, theirs)
    with pytest.raises(ControlRefused, match="could not prove"):
        wire.check_driver_proof(wire.driver_proof(b"wrong", theirs, mine), secret, theirs, mine)


@pytest.mark.parametrize("version", [1, wire.VERSION + 1])
def test_another_version_is_refused_with_both_numbers(monkeypatch, version):
    nonce = wire.new_nonce()
    with monkeypatch.context() as patch:
        patch.setattr(wire, "VERSION", version)
        greeting, answer = wire.greeting(nonce), wire.answer(b"secret", nonce, nonce)
    text = f"uses version {version} of the control protocol, but this side uses version {wire.VERSION}"
    with pytest.raises(ControlRefused, match=f"the driver {text}.* Install the same version"):
        wire.read_greeting(greeting)
    with pytest.raises(ControlRefused, match=f"the client {text}"):
        wire.read_answer(answer, b"secret", nonce)


def test_another_program_is_no_driver():
    with pytest.raises(ControlRefused, match="is not a Penstock driver"):
        wire.read_greeting(b"SSH-2.0-OpenSSH_9.6\r\n")


def test_the_length_is_checked_when_sent_and_when_received():
    assert wire.length_of(wire.framed(b"abc")[: wire.LENGTH.size]) == 3
    with pytest.raises(ControlRefused, match=r"67,108,865 bytes is longer than the limit of 67,108,864 bytes"):
        wire.length_of(struct.pack("<I", wire.MOST_BYTES + 1))
    with pytest.raises(ControlRefused, match="longer than"):
        wire.framed(bytes(wire.MOST_BYTES + 1))


def test_a_sinks_tokens_reach_the_manifest_and_the_sink_as_they_are():
    """MessagePack has no integers beyond 64 bits, and takes NumPy's floats for something else."""
    saved = SavedTask({}, _as_json("sink/0", [np.float64(1.5), 1 << 100, "\udce9"]))
    again = codec.decode_event(codec.encode(events.SnapshotWritten(3, {"sink/0": saved})))
    assert json.loads(again.tasks["sink/0"].tokens) == [1.5, 1 << 100, "\udce9"]


def test_a_token_that_is_not_json_names_the_component():
    with pytest.raises(ComponentError, match=r"component 'sink': prepare_commit returned a token that is not"):
        _as_json("sink/0", [b"bytes"])
