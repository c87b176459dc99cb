"""The commands that work on what runs, over real control connections to a coordinator without Spark."""

import json
import logging
import os
import threading

import pytest

from penstock.cli import cluster, dlq, kill
from penstock.cli.main import main
from penstock.cli.terminal import Terminal
from penstock.cli.view import duration
from penstock.driver import discovery
from penstock.driver.discovery import DriverEntry
from penstock.driver.operator import Operator
from penstock.driver.requests import Replaced
from penstock.errors import SettingError, TopologyFailed
from penstock.protocol.requests import OperatorRequest
from tests.unit.watched import Watched, busy


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    """Runs of this test alone are found; what commands add to the log's handlers goes."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    log = logging.getLogger("penstock")
    handlers = log.handlers[:]
    yield
    log.handlers[:] = handlers


@pytest.fixture
def start():
    started = []

    def start(name="word-count", **settings):
        watched = Watched(name, **settings)
        watched.server.start()
        watched.server.operator = Operator(watched)
        run = DriverEntry.here(name, watched.server.address, watched.server.secret)
        run.announce()
        watched.ended = run.withdraw
        started.append((watched, run))
        return watched

    yield start
    for watched, run in started:
        run.withdraw()
        watched.server.stop()


@pytest.fixture
def penstock(capsys):
    def penstock(*arguments):
        """Exit code, output, errors."""
        capsys.readouterr()
        code = main(arguments)
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    return penstock


def cells(text, first):
    """Of the table's row that begins so."""
    (line,) = (line for line in text.splitlines() if line.lstrip("│ ").startswith(first))
    return [cell.strip() for cell in line.strip("│ \n").split("│")]


@pytest.mark.parametrize(
    ("name", "arguments", "problem"),
    [
        ("move", {"worker": "1.0"}, "its arguments are wrong (KeyError: 'node')"),
        ("dance", {}, "there is no command 'dance', only status, queues, "),
    ],
)
def test_a_request_of_another_version_is_answered_with_what_is_wrong(start, name, arguments, problem):
    answer = Operator(start())(OperatorRequest(name, arguments))
    assert (answer.text, answer.kind) == ("", "SettingError")
    assert answer.error[1].startswith(problem)


def test_list(start, penstock):
    assert penstock("list") == (0, "no topology of this user is running on this machine\n", "")
    watched = start()
    busy(watched)
    watched.committed, watched.restarts, watched.begun = 12, 2, -7000.0
    start("second").state = "inactive"
    code, text, _ = penstock("list")
    assert code == 0
    name, state, pid, uptime, *rest = cells(text, "word-count")
    assert (name, state, pid, rest) == ("word-count", "active", str(os.getpid()), ["12", "2", "5", "67", "67"])
    assert uptime.endswith(("h", "m"))
    assert cells(text, "second")[1] == "inactive"
    rows = json.loads(penstock("list", "--json")[1])
    assert {row["topology"]: row["tasks"] for row in rows} == {"word-count": 5, "second": 5}


def test_list_shows_the_others_where_one_does_not_answer(start, penstock):
    start()
    DriverEntry.here("gone", ("127.0.0.1", 9), bytes(32)).announce()
    code, text, _ = penstock("list")
    assert code == 0
    assert cells(text, "gone")[1:4] == ["no answer", str(os.getpid()), "-"]
    assert cells(text, "word-count")[1] == "active"
    (silent,) = (row for row in json.loads(penstock("list", "--json")[1]) if row["state"] == "no answer")
    assert "it does not answer at 127.0.0.1:9" in silent["error"]


def test_status(start, penstock):
    watched = start()
    busy(watched)
    watched.committed = 12
    code, text, _ = penstock("status", "word-count")
    assert code == 0
    for part in (
        "word-count  active",
        "at_least_once",
        "epoch 12 committed",
        "restarts 0",
        "lines: max_rate 1,000/s",
    ):
        assert part in text
    assert cells(text, "split")[:2] == ["split", "2"]
    assert cells(text, "1.1") == ["1.1", "node-a", "4321", "1.5 s", "2 MB", "split/1"]
    assert cells(text, "2.0")[1:3] == ["not connected", "-"]
    assert "flow: show/0 slows its senders: 15,000 of 16,384 tuples are queued" in text
    assert "component 'show': no ink" in text
    assert cells(text, "written") == ["written", "400"]


def test_status_says_that_energy_is_modelled(start, penstock):
    watched = start(watts="100,0,0,0")
    busy(watched)
    assert "power" not in penstock("status", "word-count")[1], "nobody has looked yet"
    for _ in range(2):
        watched.poll()
        watched.clock.advance(20.0)
    text = penstock("status", "word-count")[1]
    assert "power 100 W, energy 2.0 kJ (modelled: base 2.0, dynamic 0.0); CPU 2 s" in text


def test_status_as_json_is_what_the_endpoint_has(start, penstock):
    watched = start()
    busy(watched)
    code, text, _ = penstock("status", "word-count", "--json")
    status, expected = json.loads(text), watched.status().to_json()
    assert code == 0
    assert status.keys() == expected.keys()
    for part in ("topology", "tasks", "workers", "decisions", "errors", "pending"):
        assert status[part] == expected[part]


def test_watching_ends_with_the_topology(start, penstock, monkeypatch):
    watched = start()
    looks = []

    def pause(seconds):
        looks.append(seconds)
        if len(looks) == 2:
            watched.ended()
            watched.server.stop()

    monkeypatch.setattr("penstock.cli.status.time.sleep", pause)
    code, text, _ = penstock("status", "word-count", "--watch", "--json")
    *lines, last = text.splitlines()
    assert (code, last) == (0, "'word-count' has ended")
    assert [json.loads(line)["topology"] for line in lines] == ["word-count"] * 2


def test_placement(start, penstock):
    """A topology that moves from node to node, as the load monitor sees it after its first load sample."""
    watched = start(monitor="memory", node_cores=4.0, node_memory=8_000_000_000)
    code, text, _ = penstock("placement", "word-count")
    assert (code, text.splitlines()) == (
        0,
        ["no load sample yet: the first begins when all workers have reported, and takes 30 s"],
    )
    for worker, node in (((0, 0), "a"), ((0, 1), "a"), ((1, 0), "b"), ((1, 1), "a"), ((2, 0), "b")):
        watched.connect(worker, node=node)
    for second in (0, 30):
        for worker in watched.workers:
            streams = {0: [[1, 3, second, 300 * second]], 1: [[3, 5, second, 100 * second]]}.get(worker.stage, [])
            streams = streams if worker.index == 0 else []
            watched.report(
                (worker.stage, worker.index),
                {},
                cpu=0.5 * second,
                streams=streams,
                machine={"id": "m", "cores": 8},
            )
        watched.poll()
        watched.clock.advance(30.0)
    code, text, _ = penstock("placement", "word-count")
    first, path, *rest = text.splitlines()
    assert code == 0
    assert first.startswith("based on the load sample that ended at ")
    assert path.startswith("critical path: 1.500 s of work per second")
    assert "  split@1.0 on b: 0.500" in "\n".join(rest)
    answer = json.loads(penstock("placement", "word-count", "--json")[1])
    assert answer["ended"] == 1030
    assert answer["plan"]["critical_nodes"] == ["a", "b"]
    assert answer["lines"] == [path, *rest]
    nothing = "nothing moved: no node would become free, and the benefit would be small"
    assert penstock("placement", "word-count", "--apply")[1].splitlines()[-1] == nothing
    watched.rearranged = Replaced(0.0, {}, "ERDM", gap=0.04, seconds=12.3)
    shown = penstock("placement", "word-count", "--apply")[1].splitlines()
    assert shown[1] == path, "what is done is said before"
    assert shown[-1] == "moved with 40 ms of interruption, after 12.3 s of preparation"
    assert json.loads(penstock("placement", "word-count", "--apply", "--json")[1])["moved"]["gap"] == 0.04


def test_one_worker_is_moved_by_hand(start, penstock):
    watched = start()
    code, text, _ = penstock("placement", "word-count", "--move", "1.0", "a")
    assert (code, text) == (0, "worker 1.0 moved from b to a, 41 ms of interruption\n")
    (moved,) = json.loads(penstock("placement", "word-count", "--move", "1.0", "a", "--json")[1])["moves"]
    assert (moved["worker"], moved["target"], moved["steps"]) == ("1.0", "a", {"prefetched": 0.1})
    code, _, error = penstock("placement", "word-count", "--move", "7.0", "a")
    assert code != 0
    assert "it has no worker 7.0, only 0.0, 0.1, 1.0" in error
    code, _, error = penstock("placement", "word-count", "--move", "1.0", "nowhere")
    assert (code != 0, "which has no free slot" in error) == (True, True)
    watched.rearranged = [watched.move(worker, "a") for worker in watched.plan.worker_ids()[2:4]]
    assert penstock("placement", "word-count", "--apply")[0] == 0


def test_nodes_are_taken_back_by_hand(start, penstock):
    watched = start()
    code, text, _ = penstock("placement", "word-count", "--spread")
    assert (code, text) == (0, "requested 2 more nodes; the topology uses them as soon as they have joined\n")
    watched.more = 0
    assert penstock("placement", "word-count", "--spread")[1] == "all nodes are in use\n"


def test_placement_with_the_monitor_off(start, penstock):
    start()
    code, text, _ = penstock("placement", "word-count")
    assert (code, text[:27]) == (0, "the load monitor is off: st")


@pytest.mark.parametrize("command", [["status", "word-count"], ["list"], ["status", "word-count", "--json"]])
def test_what_a_topology_says_does_not_steer_the_terminal(start, penstock, command):
    watched = start()
    watched.bus.note("scale", "count", "\x1b]0;owned\x07\x1b[2J \u202eevil")
    watched.bus.note_errors(["\x1b[31mred\x9b1m"])
    code, text, _ = penstock(*command)
    assert code == 0
    assert not set(text) & {"\x1b", "\x07", "\x9b", "\u202e"}


def test_what_a_topology_refuses_does_not_steer_the_terminal(start):
    start().error = TopologyFailed("topology '\x1b[2J'", "it is \x9b1m, not running")
    with pytest.raises(TopologyFailed) as refused:
        discovery.find("word-count").ask(OperatorRequest("activate"))
    assert not set(str(refused.value)) & {"\x1b", "\x9b"}


def test_a_name_that_looks_like_markup_is_a_name(capsys, monkeypatch):
    """rich raises for a closing tag without an opening one. Spinners show names too."""
    dlq._list(Terminal(), "[/a]", {})
    assert capsys.readouterr().out == "no dead letters in topology '[/a]'\n"
    monkeypatch.setattr(cluster, "Terminal", lambda file: Terminal(file=file, force_terminal=True))
    with cluster._progress() as progress:
        progress("'[/a]' leaves node-1")


def test_an_error_does_not_steer_the_terminal(penstock):
    code, _, text = penstock("status", "\x1b[2Jevil")
    assert code != 0
    assert "\\x1b[2Jevil" in text
    assert "\x1b" not in text


def test_activate_and_deactivate(start, penstock):
    watched = start()
    assert penstock("deactivate", "word-count") == (0, "'word-count' is inactive\n", "")
    assert watched.state == "inactive"
    assert penstock("activate", "word-count") == (0, "'word-count' is active\n", "")
    assert watched.state == "active"


def test_what_the_topology_says_no_to_keeps_its_exit_code(start, penstock):
    watched = start()
    watched.error = TopologyFailed("topology 'word-count'", "it is restarting, not running")
    code, _, text = penstock("activate", "word-count")
    assert (code, text) == (4, "penstock: topology 'word-count': it is restarting, not running.\n")


@pytest.mark.parametrize(("arguments", "drain"), [([], True), (["--no-drain"], False)])
def test_kill(start, penstock, arguments, drain):
    watched = start()
    code, text, _ = penstock("kill", "word-count", *arguments)
    assert (code, text) == (0, "'word-count' has ended\n")
    assert watched.killed_with is drain
    assert discovery.running() == []


def test_kill_says_what_was_left_behind(start, penstock):
    start().left_behind = "tuples in flight were not processed within 10 s; they are lost"
    code, text, _ = penstock("kill", "word-count")
    assert (code, text) == (
        5,
        "'word-count' has ended; tuples in flight were not processed within 10 s; they are lost\n",
    )


def test_a_topology_that_fails_on_the_way(start, penstock):
    start().error = TopologyFailed("component 'show'", "execute raised ValueError")
    code, _, text = penstock("kill", "word-count")
    assert code == 4
    assert "component 'show': execute raised ValueError." in text


def test_kill_returns_only_when_it_has_ended_and_shows_how_far_it_is(start, penstock, monkeypatch):
    watched = start()
    watched.report((0, 0), {}, pending=1234)
    shown, seen, done = [], threading.Event(), []
    progress = kill._progress

    def note(run):
        shown.append(progress(run))
        seen.set()
        return shown[-1]

    def slow(drain=True):
        assert seen.wait(30)
        watched.closing.set()
        done.append(True)
        watched.ended()

    monkeypatch.setattr(kill, "_progress", note)
    watched.kill = slow
    assert penstock("kill", "word-count")[0] == 0
    assert done
    assert shown[0] == "waiting for 1,234 tuples in flight …"


def test_a_topology_that_never_ends_is_said(start, penstock, monkeypatch):
    watched = start()
    watched.ended = lambda: None
    monkeypatch.setattr(kill, "_STOP_TIMEOUT", 0.0)
    code, _, text = penstock("kill", "word-count")
    assert code == 4
    assert f"process {os.getpid()} still runs it" in text


@pytest.mark.parametrize(
    "command", [["status"], ["queues"], ["activate"], ["deactivate"], ["kill"], ["set", "lines.max_rate=9"]]
)
def test_a_wrong_name_lists_what_runs(start, penstock, command):
    start()
    code, out, text = penstock(command[0], "wordcount", *command[1:])
    assert (code, out) == (2, "")
    assert "topology 'wordcount': no topology of that name is running for this user on this machine. " in text
    assert f"Running: 'word-count' (process {os.getpid()})" in text


def test_queues_without_a_name_points_to_list(penstock):
    code, _, text = penstock("queues")
    assert code == 2
    assert "penstock queues: the name of a topology is missing. penstock list shows the names." in text


def test_a_command_of_another_version(start):
    start()
    with pytest.raises(
        SettingError, match=r"there is no command 'dance', only status, .*\. It may run with another"
    ):
        discovery.find("word-count").ask(OperatorRequest("dance"))


def test_no_port_out_of_range(penstock, capsys):
    with pytest.raises(SystemExit) as exit:
        main(["run", "x.py", "--http", "70000"])
    assert exit.value.code == 2
    assert "70000 is not a port: a whole number from 0 to 65535" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.9, "0 s"), (59.9, "59 s"), (61, "1 m 1 s"), (3600, "1 h 0 m"), (7384, "2 h 3 m"), (200_000, "2 d 7 h")],
)
def test_durations(seconds, text):
    assert duration(seconds) == text
