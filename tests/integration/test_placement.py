"""Workers move to other nodes while the topology runs. Needs several nodes, so each test has its own session."""

import re
import subprocess
import sys
import textwrap

import pytest

from penstock import Monitor, Placement, Settings, TopologyBuilder
from tests.fault.components import Numbers, Pass

pytestmark = pytest.mark.spark

MOVES = """
    import sys
    from penstock import Delivery, Settings, TopologyBuilder, submit
    from penstock.errors import NotEnoughSlots
    from penstock.spark.session import close_session
    from tests.fault.components import Count, Numbers, Pass

    builder = TopologyBuilder()
    builder.set_spout("numbers", Numbers(10_000_000, 1_000))
    builder.set_bolt("pass", Pass(), 2).shuffle_grouping("numbers")
    builder.set_bolt("count", Count(), 2).fields_grouping("pass", "key")
    settings = Settings(delivery=Delivery("exactly_once", state_dir=sys.argv[1], epoch_interval=0.5))
    running = submit(builder.build("placed", settings), "local-cluster[2,24,1024]")
    def awaited(condition):
        assert running.coordinator.wait(condition, 60)

    where = lambda: {worker: connection.hello.node for worker, connection in running.workers.items()}
    try:
        every = sorted(set(where().values()))
        running.place({str(worker): every[0] for worker in where()}, "together")
        assert set(where().values()) == {every[0]}, where()
        before = running.bus.totals()["count"].executed
        awaited(lambda: running.bus.totals()["count"].executed > before + 500)
        try:
            running.place({worker: "nowhere" for worker in where()})
        except Exception as error:
            print(error)
        nodes, kept = running._starter.nodes, next(iter(where().values()))
        (left,) = {name for name in every if name != kept}
        running.place({worker: kept for worker in where()}, "fewer", leave={left})
        assert set(where().values()) == {kept}, where()
        awaited(lambda: running._starter.spark.sparkContext._jsc.sc().getExecutorMemoryStatus().size() == 2)
        assert (nodes.present(), nodes.away) == (1, 1), "the executor has ended, and no other is there for it"
        running.spread()
        awaited(lambda: len(running.replacements) == 3)
        assert len(set(where().values())) == 2 and left not in where().values(), where()
        running.kill()
        print("restarts", running.restarts, "replaced", len(running.replacements))
    finally:
        running.kill(drain=False)
        close_session()
"""

ONE_BY_ONE = """
    import sys
    from pathlib import Path
    from penstock import Delivery, Placement, Settings, TopologyBuilder, submit
    from penstock.errors import PenstockError
    from penstock.plan.model import WorkerId
    from penstock.spark.session import close_session
    from tests.fault.components import Count, Numbers
    from tests.integration.placed import Picky

    refuses = Path(sys.argv[1]) / "refuses"

    def other(running, worker):
        slots = running.current.registry.slots.values()
        (node,) = {slot.hello.node for slot in slots} - {running.workers[worker].hello.node}
        return node

    def moved(running, worker):
        node = other(running, worker)
        free = running.coordinator.wait(lambda: (worker.stage, node) in running.free_slots, 30)
        assert free, (worker, node, running.free_slots)
        return node, running.move(worker, node)

    def check(delivery):
        builder = TopologyBuilder()
        builder.set_spout("numbers", Numbers(10_000_000, 2_000))
        builder.set_bolt("pass", Picky(refuses), 2).shuffle_grouping("numbers")
        builder.set_bolt("count", Count(), 2).fields_grouping("pass", "key").fields_grouping("numbers", "key")
        settings = Settings(
            delivery=Delivery(delivery, state_dir=sys.argv[1], epoch_interval=0.5),
            placement=Placement(spare_slots=2),
        )
        running = submit(builder.build(f"slots-{delivery}", settings), "local-cluster[2,16,1024]")
        try:
            for worker in (WorkerId(2, 0), WorkerId(1, 0), WorkerId(2, 1), WorkerId(2, 0)):  # and back
                before = running.bus.totals()["count"].executed
                node, done = moved(running, worker)
                assert running.workers[worker].hello.node == node == done.target, done
                assert list(done.steps) == ["placed", "doubled", "stored", "mapped", "merged", "switched"]
                assert running.coordinator.wait(
                    lambda: running.bus.totals()["count"].executed > before + 500, 30
                ), "it goes on, and so do its counts"
            for worker, node in ((WorkerId(0, 0), other(running, WorkerId(0, 0))), (WorkerId(1, 0), "nowhere")):
                try:
                    running.move(worker, node)
                except PenstockError as error:
                    print(delivery, "refused:", error)
            if delivery == "exactly_once":
                stays = running.workers[WorkerId(1, 1)].hello.node
                refuses.write_text(f"1 {other(running, WorkerId(1, 1))}")
                try:
                    moved(running, WorkerId(1, 1))
                except PenstockError as error:
                    print(delivery, "lost:", error)
                assert running.coordinator.wait(lambda: running.restarts and running.state == "active", 60)
                assert running.workers[WorkerId(1, 1)].hello.node == stays, "it is started again where it was"
                refuses.unlink()
                before = running.bus.totals()["count"].executed
                assert running.coordinator.wait(lambda: running.bus.totals()["count"].executed > before, 30)
            assert running.scale({"count": 3}).gap < 30, "what has moved can be replaced"
            running.kill()
            total = running.bus.totals()
            assert not running.bus.last_errors(), running.bus.last_errors()
            if delivery != "exactly_once":  # there what was not committed was done twice
                assert total["count"].executed == 2 * total["numbers"].emitted, total
                assert total["pass"].executed == total["numbers"].emitted, total
            print(delivery, "moved", len(running.moves), "restarts", bool(running.restarts))
        finally:
            running.kill(drain=False)

    try:
        for delivery in ("at_most_once", "at_least_once", "exactly_once"):
            check(delivery)
    finally:
        close_session()
"""


def run_on_two_nodes(script, folder):
    command = [sys.executable, "-c", textwrap.dedent(script), str(folder / "state")]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)


def test_workers_go_where_they_are_wanted_and_nodes_are_left_and_come_back(tmp_path):
    done = run_on_two_nodes(MOVES, tmp_path)
    assert "restarts 0 replaced 3" in done.stdout, done.stdout + done.stderr
    assert "its workers cannot be where they are wanted (worker 0.0 on nowhere" in done.stdout, (
        done.stdout + done.stderr
    )


def test_one_worker_moves_alone_at_every_level(tmp_path):
    done = run_on_two_nodes(ONE_BY_ONE, tmp_path)
    said = done.stdout + done.stderr
    for delivery, restarts in (("at_most_once", False), ("at_least_once", False), ("exactly_once", True)):
        assert f"{delivery} moved 4 restarts {restarts}" in done.stdout, said
        assert f"{delivery} refused: topology 'slots-{delivery}': a worker of bolts moves alone" in done.stdout, (
            said
        )
    assert "nowhere; slots are free on" in done.stdout, said
    assert re.search(r"exactly_once lost: .* worker 1\.1 cannot go on on .*: not here", done.stdout), said


def test_erdm_on_one_node_has_nothing_to_do(run):
    builder = TopologyBuilder()
    builder.set_spout("numbers", Numbers(10_000_000, 100))
    builder.set_bolt("pass", Pass()).shuffle_grouping("numbers")
    running = run.submit(
        builder.build("alone", Settings(placement=Placement("erdm"), monitor=Monitor(window=1.0)))
    )
    assert running.coordinator.wait(lambda: running.monitor.newest(running.bus) is not None, 30)
    assert "released: none" in running.placement()
    assert running.rearrange() is None
    running.spread()
    assert not running.placements.decisions
    running.kill()
    assert not running.replacements
