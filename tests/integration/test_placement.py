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
    from penstock import Delivery, Settings, TopologyBuilder, Workers, submit
    from penstock.errors import NotEnoughSlots
    from penstock.spark.session import close_session
    from tests.fault.components import Count, Numbers, Pass

    builder = TopologyBuilder()
    builder.set_spout("numbers", Numbers(10_000_000, 1_000))
    builder.set_bolt("pass", Pass(), 2).shuffle_grouping("numbers")
    builder.set_bolt("count", Count(), 2).fields_grouping("pass", "key")
    settings = Settings(
        delivery=Delivery("exactly_once", state_dir=sys.argv[1], epoch_interval=0.5), workers=Workers(5)
    )
    running = submit(builder.build("placed", settings), "local-cluster[2,24,1024]")
    inside = running.internals
    def awaited(condition):
        assert inside.server.wait(condition, 60)

    where = lambda: {worker: connection.hello.node for worker, connection in inside.workers.items()}
    try:
        every = sorted(set(where().values()))
        running.place({str(worker): every[0] for worker in where()}, "together")
        assert set(where().values()) == {every[0]}, where()
        before = inside.bus.totals()["count"].executed
        awaited(lambda: inside.bus.totals()["count"].executed > before + 500)
        try:
            running.place({worker: "nowhere" for worker in where()})
        except Exception as error:
            print(error)
        engine, kept = inside.supervisor.engine, next(iter(where().values()))
        (left,) = {name for name in every if name != kept}
        running.place({worker: kept for worker in where()}, "fewer", leave={left})
        assert set(where().values()) == {kept}, where()
        context = engine.spark.sparkContext._jsc.sc()
        awaited(lambda: context.getExecutorMemoryStatus().size() == 2)
        assert (len(engine.nodes()), engine.nodes_away) == (1, 1), "the executor has ended, without another for it"
        inside.placing.spread()
        awaited(lambda: len(inside.replacements) == 3)
        assert len(set(where().values())) == 2 and left not in where().values(), where()
        running.kill()
        print("restarts", inside.restarts, "replaced", len(inside.replacements))
    finally:
        running.kill(drain=False)
        close_session()
"""

ONE_BY_ONE = """
    import sys
    from pathlib import Path
    from penstock import Delivery, Placement, Settings, TopologyBuilder, Workers, submit
    from penstock.errors import PenstockError
    from penstock.plan.model import WorkerId
    from penstock.spark.session import close_session
    from tests.fault.components import Count, Numbers
    from tests.integration.placed import Picky

    refuses = Path(sys.argv[1]) / "refuses"

    def other(running, worker):
        slots = running.internals.supervisor.runs.current.registry.slots.values()
        (node,) = {slot.hello.node for slot in slots} - {running.internals.workers[worker].hello.node}
        return node

    def moved(running, worker):
        node = other(running, worker)
        inside = running.internals
        free = inside.server.wait(lambda: (worker.stage, node) in inside.placing.free_slots, 30)
        assert free, (worker, node, inside.placing.free_slots)
        return node, running.move(worker, node)

    def check(delivery):
        builder = TopologyBuilder()
        builder.set_spout("numbers", Numbers(10_000_000, 2_000))
        builder.set_bolt("pass", Picky(refuses), 2).shuffle_grouping("numbers")
        builder.set_bolt("count", Count(), 2).fields_grouping("pass", "key").fields_grouping("numbers", "key")
        settings = Settings(
            delivery=Delivery(delivery, state_dir=sys.argv[1], epoch_interval=0.5),
            placement=Placement(spare_slots=2),
            workers=Workers(5),
        )
        running = submit(builder.build(f"slots-{delivery}", settings), "local-cluster[2,16,1024]")
        inside = running.internals
        try:
            for worker in (WorkerId(2, 0), WorkerId(1, 0), WorkerId(2, 1), WorkerId(2, 0)):  # the first returns
                before = inside.bus.totals()["count"].executed
                node, done = moved(running, worker)
                assert inside.workers[worker].hello.node == node == done.target, done
                steps = ["prefetched", "doubled", "stored", "mapped", "merged", "switched"]
                assert [step for step in done.steps if step in steps] == steps, done.steps
                assert inside.server.wait(
                    lambda: inside.bus.totals()["count"].executed > before + 500, 30
                ), "it goes on, and so do its counts"
            for worker, node in ((WorkerId(0, 0), other(running, WorkerId(0, 0))), (WorkerId(1, 0), "nowhere")):
                try:
                    running.move(worker, node)
                except PenstockError as error:
                    print(delivery, "refused:", error)
            if delivery == "exactly_once":
                stays = inside.workers[WorkerId(1, 1)].hello.node
                refuses.write_text(f"1 {other(running, WorkerId(1, 1))}")
                try:
                    moved(running, WorkerId(1, 1))
                except PenstockError as error:
                    print(delivery, "lost:", error)
                assert inside.server.wait(lambda: inside.restarts and running.state == "active", 60)
                assert inside.workers[WorkerId(1, 1)].hello.node == stays, "it is started again where it was"
                refuses.unlink()
                before = inside.bus.totals()["count"].executed
                assert inside.server.wait(lambda: inside.bus.totals()["count"].executed > before, 30)
            assert running.scale({"count": 3}).gap < 30, "what has moved can be replaced"
            running.kill()
            total = inside.bus.totals()
            assert not inside.bus.last_errors(), inside.bus.last_errors()
            if delivery != "exactly_once":  # there what was not committed was done twice
                assert total["count"].executed == 2 * total["numbers"].emitted, total
                assert total["pass"].executed == total["numbers"].emitted, total
            print(delivery, "moved", len(inside.placing.moves), "restarts", bool(inside.restarts))
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
    assert "these workers cannot run on their requested nodes: worker 0.0 on nowhere" in done.stdout, (
        done.stdout + done.stderr
    )


def test_one_worker_moves_alone_at_every_level(tmp_path):
    done = run_on_two_nodes(ONE_BY_ONE, tmp_path)
    said = done.stdout + done.stderr
    for delivery, restarts in (("at_most_once", False), ("at_least_once", False), ("exactly_once", True)):
        assert f"{delivery} moved 4 restarts {restarts}" in done.stdout, said
        assert f"{delivery} refused: topology 'slots-{delivery}': worker 0.0 on" in done.stdout, said
    assert "cannot move to nowhere: a worker can move if it runs only bolts" in done.stdout, said
    assert re.search(r"exactly_once lost: .* worker 1\.1 could not continue on .*: not here", done.stdout), said


def test_erdm_on_one_node_has_nothing_to_do(run):
    builder = TopologyBuilder()
    builder.set_spout("numbers", Numbers(10_000_000, 100))
    builder.set_bolt("pass", Pass()).shuffle_grouping("numbers")
    running = run.submit(
        builder.build("alone", Settings(placement=Placement("erdm"), monitor=Monitor(interval=1.0)))
    )
    assert running.internals.server.wait(
        lambda: running.internals.monitor.newest(running.internals.bus) is not None, 30
    )
    assert "released: none" in running.internals.placing.explain()
    assert running.internals.placing.rearrange() is None
    running.internals.placing.spread()
    assert not running.internals.placements.decisions
    running.kill()
    assert not running.internals.replacements
