"""The bolt with its real queue, processor and store, in a topology on simulated time. The processor is a separate
process: a test that needs its work done closes the bolt, which drains the queue."""

import dataclasses
import os
import shutil
import signal
import sqlite3
import time
from pathlib import Path

import pytest

from penstock import Delivery, Lifecycle, Settings, Spout, TopologyBuilder
from penstock.cli.main import main
from penstock.errors import ComponentError, LoadError, SinkRefused, TopologyError
from penstock.persist import (
    EmbeddedQueue,
    MemcachedQueue,
    MemoryQueue,
    ParquetStore,
    PersistBolt,
    SQLiteStore,
    Store,
)
from penstock.persist.keeper import Keeper
from penstock.persist.processor import ProcessorStatus
from penstock.persist.queues import QueueUnavailable
from penstock.persist.spec import ProcessorSpec, load_from_folder
from penstock.persist.stores import StoreClient, StoreUnavailable
from penstock.plan.planner import make_plan
from penstock.plan.render import as_text
from penstock.testing import LocalRunner
from tests.helpers import settings_with


class Numbers(Spout):
    """Emits ⟨word, n⟩ with its position in state, and resumes there after a restart."""

    def __init__(self, count):
        self.count = count

    def declare_output_fields(self, declarer):
        declarer.declare("word", "n")

    def open(self, conf, context, collector):
        self.collector = collector
        self.next = context.state.value("next", 0)
        self.acked = 0

    def next_tuple(self):
        n = self.next.value
        if n < self.count:
            self.collector.emit([f"w{n % 7}", n], msg_id=n)
            self.next.value = n + 1

    def ack(self, msg_id):
        self.acked += 1


class NoStore(Store):
    """A queue that is never available."""

    key = ()

    def check(self, where):
        pass

    def open(self):
        return NoClient()

    def __str__(self):
        return "nowhere"


class NoClient(StoreClient):
    def progress(self, queue):
        raise StoreUnavailable("the store", "it is not there")

    write = progress

    def close(self):
        pass


@pytest.fixture
def start(tmp_path):
    """Starts a topology with a PersistBolt in the test's folder, and ends it if the test did not."""
    runners = []

    def begin(bolt, count=1000, delivery="at_least_once", tasks=1, **settings):
        builder = TopologyBuilder()
        builder.set_spout("numbers", Numbers(count))
        builder.set_bolt("persist", bolt, tasks).fields_grouping("numbers", "word")
        state = str(tmp_path / "state")
        topology = builder.build(
            "shop", settings_with(delivery=delivery, state_dir=state, message_timeout=1000.0, **settings)
        )
        runner = LocalRunner(topology, folder=None if delivery == "at_most_once" else state)
        runners.append(runner)
        return runner

    yield begin
    for runner in runners:
        runner.close()


def sqlite(tmp_path, **more):
    return SQLiteStore(str(tmp_path / "shop.db"), "results", **more)


def stored(tmp_path):
    with sqlite3.connect(tmp_path / "shop.db") as connection:
        return connection.execute("SELECT word, n FROM results ORDER BY n").fetchall()


WANTED = [(f"w{n % 7}", n) for n in range(1000)]


@pytest.mark.parametrize("delivery", ["at_most_once", "at_least_once"])
def test_results_are_acked_at_once_and_stored_in_the_end(start, tmp_path, delivery):
    runner = start(PersistBolt(sqlite(tmp_path)), delivery=delivery, tasks=2)
    runner.run(2.0)
    assert runner.component("numbers")[0].acked == 1000
    runner.close()
    assert runner.errors == []
    assert stored(tmp_path) == WANTED


def test_exactly_once_results_enter_the_queue_with_their_epoch(start, tmp_path):
    runner = start(PersistBolt(sqlite(tmp_path)), delivery="exactly_once", tasks=2)
    runner.run(2.0)
    bolt = runner.component("persist")[0]
    assert bolt._writer.client.waiting() == 0
    runner.commit()
    runner.close()
    assert stored(tmp_path) == WANTED


def test_exactly_once_an_epoch_that_was_never_committed_leaves_nothing(start, tmp_path):
    first = start(PersistBolt(sqlite(tmp_path)), delivery="exactly_once", count=300)
    first.run(2.0)
    first.commit()
    first.component("numbers")[0].count = 600
    first.run(2.0)  # staged, not committed
    first.close()
    again = start(PersistBolt(sqlite(tmp_path)), delivery="exactly_once")
    again.run(3.0)
    again.commit()
    again.close()
    assert stored(tmp_path) == WANTED


@pytest.mark.parametrize("delivery", ["at_least_once", "exactly_once"])
def test_it_goes_on_with_another_number_of_tasks(start, tmp_path, delivery):
    for turn, tasks in enumerate([2, 3, 1, 2]):  # tasks that were removed are added again
        runner = start(PersistBolt(sqlite(tmp_path)), delivery=delivery, count=250 * (turn + 1), tasks=tasks)
        runner.run(2.0)
        runner.commit()
        runner.close()
        assert runner.errors == []
    assert stored(tmp_path) == WANTED


@pytest.mark.parametrize("step", ["committed:1:driver", "published:1:1.0"])
def test_exactly_once_an_epoch_that_is_published_twice_is_stored_once(start, tmp_path, step):
    class Died(BaseException):
        pass

    def die():
        raise Died

    builder = TopologyBuilder()
    builder.set_spout("numbers", Numbers(1000))
    builder.set_bolt("persist", PersistBolt(sqlite(tmp_path))).fields_grouping("numbers", "word")
    settings = Settings(
        delivery=Delivery("exactly_once", state_dir=str(tmp_path / "state")), lifecycle=Lifecycle(crash_at=step)
    )
    runner = LocalRunner(builder.build("shop", settings), folder=str(tmp_path / "state"), die=die)
    runner.run(2.0)
    with pytest.raises(Died):
        runner.commit()
    runner.component("persist")[0]._keeper.close(3.0)
    again = start(PersistBolt(sqlite(tmp_path)), delivery="exactly_once")
    again.run(1.0)
    again.commit()
    again.close()
    assert stored(tmp_path) == WANTED


def test_a_full_queue_stops_the_bolt_and_nothing_else(start, tmp_path):
    bolt = PersistBolt(NoStore(), EmbeddedQueue(max_bytes=20_000), drain_for=0.0)
    runner = start(bolt, count=100_000)
    runner.run(20.0)
    task = runner.component("persist")[0]
    acked = runner.component("numbers")[0].acked
    assert 20_000 <= task._writer.client.waiting() < 20_000 + 600_000, "full, and by no more than one entry"
    assert not task.ready()
    assert 0 < acked < 100_000
    assert runner.errors == [], "full is not an error"
    runner.run(5.0)
    assert runner.component("numbers")[0].acked == acked


def test_exactly_once_a_full_queue_stops_the_bolt_too(start, tmp_path):
    bolt = PersistBolt(NoStore(), EmbeddedQueue(max_bytes=20_000), drain_for=0.0)
    runner = start(bolt, count=3_000, delivery="exactly_once", epoch_interval=1000.0)
    runner.run(1.0)
    runner.commit()
    task, spout = runner.component("persist")[0], runner.component("numbers")[0]
    assert task._writer.client.waiting() > 20_000
    executed = runner.stats("persist")[0].executed
    assert executed == 3_000
    spout.count = 1_000_000  # the queue is asked again only after the room it reported is used up
    runner.run(1.0)
    executed = runner.stats("persist")[0].executed
    assert executed < 100_000
    assert not task.ready()
    runner.run(1.0)
    assert runner.stats("persist")[0].executed == executed


def test_exactly_once_a_full_queue_does_not_keep_the_topology_from_starting(start, tmp_path):
    queue = EmbeddedQueue(max_bytes=5_000)
    first = start(PersistBolt(NoStore(), queue, drain_for=0.0), delivery="exactly_once")
    first.run(1.0)
    first.commit()
    first.component("numbers")[0].count = 100_000  # the queue is asked again only after the room is used up
    first.run(1.0)
    first.close()
    assert not first.component("persist")[0].ready()
    again = start(PersistBolt(sqlite(tmp_path), queue), delivery="exactly_once")
    again.run(1.0)
    again.close()
    assert stored(tmp_path) == WANTED


def test_a_worker_that_was_replaced_stops_instead_of_acking(start, tmp_path):
    runner = start(PersistBolt(sqlite(tmp_path)), count=1000)
    runner.run(0.5)
    bolt = runner.component("persist")[0]
    bolt._writer.client.register("persist/0")  # as the process that replaces it does
    spout = runner.component("numbers")[0]
    assert spout.acked == 1000
    spout.count = 2000
    with pytest.raises(SinkRefused, match="another process has registered as"):
        runner.run(1.0)
    assert spout.acked == 1000


def test_another_queue_is_refused_while_something_waits_in_the_last_one(start, tmp_path):
    first = start(PersistBolt(NoStore(), EmbeddedQueue(str(tmp_path / "one")), drain_for=0.0))
    first.run(1.0)
    first.close()
    with pytest.raises(ComponentError, match="penstock drain shop --component persist"):
        start(PersistBolt(sqlite(tmp_path), EmbeddedQueue(str(tmp_path / "two"))))
    last = start(PersistBolt(sqlite(tmp_path), EmbeddedQueue(str(tmp_path / "one"))))
    last.close()
    start(PersistBolt(sqlite(tmp_path), EmbeddedQueue(str(tmp_path / "two"))))


def test_the_specification_is_for_this_user_only(start, tmp_path):
    start(PersistBolt(sqlite(tmp_path)))
    (path,) = (tmp_path / "state").rglob("spec.pickle")
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_specification_that_is_not_signed_with_our_key_is_never_unpickled(start, tmp_path, capsys):
    start(PersistBolt(sqlite(tmp_path))).close()
    (path,) = (tmp_path / "state").rglob("spec.pickle")
    whole = path.read_bytes()
    for changed in (
        whole[16:],
        bytes(16) + whole[16:],
        b"cos\nsystem\n(S'touch " + str(tmp_path).encode() + b"/ran'\ntR.",
    ):
        path.write_bytes(changed)
        assert main(["drain", "shop", "--state-dir", str(tmp_path / "state")]) != 0
        assert "is signed with another key" in capsys.readouterr().err
    assert not (tmp_path / "ran").exists()


def test_a_specification_that_was_copied_from_another_component_is_rejected(start, tmp_path, capsys):
    """Its signature is valid, but drain would write the other component's queue, and a run would look for it."""
    start(PersistBolt(sqlite(tmp_path))).close()
    (path,) = (tmp_path / "state").rglob("spec.pickle")
    for topology, component in (("shop", "other"), ("mall", "persist")):
        copy = Path(str(path).replace("/shop/", f"/{topology}/").replace("/persist/", f"/{component}/"))
        copy.parent.mkdir(parents=True)
        copy.write_bytes(path.read_bytes())
        assert main(["drain", topology, "--state-dir", str(tmp_path / "state")]) == 2
        said = f"component '{component}' of topology '{topology}': its spec.pickle belongs to"
        assert f"{said} 'persist' of topology 'shop'." in capsys.readouterr().err
        with pytest.raises(LoadError, match="belongs to"):
            load_from_folder(str(copy.parent), topology, component)
        copy.unlink()


def test_the_processor_imports_nothing_from_the_folder_it_is_started_in(tmp_path, monkeypatch):
    for name in ("sqlite3", "secrets", "pyarrow", "struct"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'a').write({name!r})")
    (tmp_path / "penstock").mkdir()
    (tmp_path / "penstock" / "__init__.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'a').write('penstock')")
    spec = ProcessorSpec(
        "t", "c", EmbeddedQueue(str(tmp_path / "q")), sqlite(tmp_path), "", str(tmp_path / "dead"), 1.0, 10, 5.0
    )
    monkeypatch.chdir(tmp_path)
    heard = []
    keeper = Keeper(spec.dumps(), heard.append)
    while not heard:
        time.sleep(0.01)
    assert keeper.close(5.0), heard
    assert not (tmp_path / "ran").exists(), (tmp_path / "ran").read_text()


def test_dead_letters_elsewhere_are_found(start, tmp_path, capsys):
    with sqlite3.connect(tmp_path / "shop.db") as connection:
        connection.execute("CREATE TABLE results (word TEXT, n INTEGER CHECK (n <> 13))")
    runner = start(PersistBolt(sqlite(tmp_path), dead_letters=str(tmp_path / "dead_letters")))
    runner.run(2.0)
    runner.close()
    assert main(["dlq", "list", "--topology", "shop", "--state-dir", str(tmp_path / "state")]) == 0
    assert "'n': 13" in capsys.readouterr().out


def test_what_is_left_at_the_end_is_written_by_penstock_drain(start, tmp_path, capsys):
    runner = start(PersistBolt(sqlite(tmp_path), flush_every=100.0, flush_rows=10**6, drain_for=0.0))
    runner.run(2.0)
    keeper = runner.component("persist")[0]._keeper
    os.kill(keeper.pid, signal.SIGKILL)
    keeper._ending.set()
    runner.close()
    assert main(["drain", "shop", "--state-dir", str(tmp_path / "state")]) == 0
    assert "persist: " in capsys.readouterr().out
    assert stored(tmp_path) == WANTED
    assert main(["drain", "shop", "--state-dir", str(tmp_path / "state")]) == 0
    assert "persist: 0 rows written" in capsys.readouterr().out
    assert main(["drain", "shopp", "--state-dir", str(tmp_path / "state")]) == 2
    assert "topology 'shopp' has no PersistBolt that has run here" in capsys.readouterr().err


def test_a_processor_that_is_killed_is_replaced(start, tmp_path):
    runner = start(PersistBolt(sqlite(tmp_path), flush_every=0.05))
    keeper = runner.component("persist")[0]._keeper
    runner.run(0.2)
    first = _pid(keeper)
    os.kill(first, signal.SIGKILL)
    _wait(lambda: keeper.pid != first)
    runner.run(2.0)
    runner.close()
    assert stored(tmp_path) == WANTED


def test_trouble_is_shown_and_a_row_the_store_refuses_is_reported(start, tmp_path):
    with sqlite3.connect(tmp_path / "shop.db") as connection:
        connection.execute("CREATE TABLE results (word TEXT, n INTEGER CHECK (n <> 13))")
    runner = start(PersistBolt(sqlite(tmp_path)))
    runner.run(2.0)
    runner.close()
    assert len(stored(tmp_path)) == 999
    (error,) = runner.errors
    assert "it refused 1 rows" in str(error)
    assert "penstock dlq list --topology shop" in str(error)


def test_dead_letters_are_listed_and_sent_back(start, tmp_path, capsys):
    with sqlite3.connect(tmp_path / "shop.db") as connection:
        connection.execute("CREATE TABLE results (word TEXT, n INTEGER CHECK (n <> 13))")
    runner = start(PersistBolt(sqlite(tmp_path)))
    runner.run(2.0)
    runner.close()
    where = ["--topology", "shop", "--state-dir", str(tmp_path / "state")]
    assert main(["dlq", "list", *where]) == 0
    shown = capsys.readouterr().out
    assert "CHECK constraint failed" in shown
    assert "'n': 13" in shown
    with sqlite3.connect(tmp_path / "shop.db") as connection:
        connection.execute("DROP TABLE results")
        connection.execute("CREATE TABLE results (word TEXT, n INTEGER)")
    assert main(["dlq", "send-back", "--all", *where]) == 0
    assert main(["drain", "shop", "--state-dir", str(tmp_path / "state")]) == 0
    assert stored(tmp_path) == [("w6", 13)]
    assert main(["dlq", "list", *where]) == 0
    assert "no dead letters" in capsys.readouterr().out


def test_mistakes_are_named_when_the_bolt_is_made(tmp_path):
    with pytest.raises(TopologyError, match=r"it needs a store and a queue, and has str and EmbeddedQueue. Write"):
        PersistBolt("results.db")
    with pytest.raises(TopologyError, match="flush_rows"):
        PersistBolt(sqlite(tmp_path), flush_rows=0)


@pytest.mark.parametrize(
    ("queue", "says"),
    [
        (lambda folder: EmbeddedQueue(), "the embedded queue needs a folder on a local path"),
        (lambda folder: EmbeddedQueue(folder), "dead letters need a local folder"),
    ],
)
def test_a_state_directory_elsewhere_needs_local_folders(tmp_path, queue, says):
    bolt = PersistBolt(ParquetStore(str(tmp_path / "out")), queue(str(tmp_path / "queue")))
    builder = TopologyBuilder()
    builder.set_spout("numbers", Numbers(10))
    builder.set_bolt("persist", bolt).shuffle_grouping("numbers")
    topology = builder.build("shop", Settings(delivery=Delivery(state_dir="memory://state")))
    with pytest.raises(ComponentError, match=says):
        LocalRunner(topology)


def _pid(keeper):
    _wait(lambda: keeper.pid is not None)
    return keeper.pid


def _wait(condition):
    """Polls another process, because there is nothing to wait on."""
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def topology_with(queue, tmp_path, delivery):
    builder = TopologyBuilder()
    builder.set_spout("numbers", Numbers(1))
    builder.set_bolt("persist", PersistBolt(sqlite(tmp_path), queue)).fields_grouping("numbers", "word")
    return builder.build("shop", settings_with(delivery=delivery, state_dir=str(tmp_path / "state")))


def test_a_queue_in_the_machine_s_memory_is_refused_with_exactly_once_delivery(tmp_path):
    with pytest.raises(TopologyError) as caught:
        topology_with(MemoryQueue(), tmp_path, "exactly_once")
    assert str(caught.value) == (
        "component 'persist': its queue, in the memory of the machine, cannot keep exactly-once delivery: if the "
        "machine crashes or restarts, what waits in its memory is lost. Use EmbeddedQueue or RedisQueue, or "
        "at_least_once."
    )


@pytest.mark.parametrize(
    ("queue", "says"),
    [
        (
            MemoryQueue(),
            "results wait in the memory of the machine: if the machine crashes or restarts, what waits in its "
            "memory is lost.",
        ),
        (
            MemcachedQueue("a:1"),
            "results wait in memcached at a:1: if a server of memcached dies, what waits in it is lost.",
        ),
        (
            MemcachedQueue(["a:1", "b:1"], copies=2),
            "results wait in memcached at a:1, b:1, 2 copies of each entry: if 2 servers of memcached die at "
            "the same time, what waits in them is lost.",
        ),
        (EmbeddedQueue(), ""),
    ],
    ids=str,
)
def test_the_plan_says_what_loses_results(queue, says, tmp_path):
    topology = topology_with(queue, tmp_path, "at_least_once")
    assert topology.cautions() == ([("persist", says)] if says else [])
    text = as_text(topology, make_plan(topology))
    assert ("cautions" in text) == bool(says)
    assert says in text


def test_what_the_queue_has_lost_is_said_and_counted(start, tmp_path):
    runner = start(PersistBolt(sqlite(tmp_path), MemoryQueue()), count=1)
    bolt = runner.component("persist")[0]
    shown = []
    bolt.context = dataclasses.replace(bolt.context, publish=shown.append)
    bolt._show(ProcessorStatus(lost=3))
    bolt._show(ProcessorStatus(lost=3))
    assert ("entries lost by the queue", 3) in shown[-1]
    assert ("caution", MemoryQueue().volatile) in shown[-1]
    (error,) = map(str, runner.errors)
    assert error.partition(": ")[2] == (
        "the queue in the memory of the machine has lost 3 entries: their results were acknowledged and will not "
        "be in the store. Compute them again if they matter. EmbeddedQueue and RedisQueue lose none, and "
        "MemcachedQueue with copies=2 loses none when one server dies."
    )
    shutil.rmtree(bolt._writer.client._folder.parent)


def test_a_queue_in_memory_is_read_on_one_machine_only(tmp_path, monkeypatch):
    here = MemoryQueue().open("t/persist", str(tmp_path))
    incarnation = here.register("persist/0")
    here.put([b"a"], "persist/0", incarnation)
    here.id()  # of the processor, which claims the queue
    assert here.warning == ""
    monkeypatch.setattr("penstock.persist.memory._machine", lambda: "elsewhere boot")
    there = MemoryQueue().open("t/persist", str(tmp_path))
    for ask in (lambda: there.register("persist/1"), there.waiting):
        with pytest.raises(QueueUnavailable, match=r"and this worker runs on elsewhere\. Use EmbeddedQueue"):
            ask()
    there.id()  # a processor there
    assert "it is in the memory of elsewhere now and was in that of" in there.warning
    assert there.register("persist/1")
    shutil.rmtree(here._folder.parent)
