"""Every example, the README's and the tutorial's code included, runs; each one's result is checked."""

import dataclasses
import re
import sqlite3
import sys
from collections import Counter
from pathlib import Path

import pyarrow.dataset as ds
import pytest

from penstock import DedupBolt, Delivery, Settings, TopologyBuilder
from penstock.cli.loading import load_topology
from penstock.testing import FeederSpout, LocalRunner

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def code_blocks(path):
    return re.findall(r"```python\n(.*?)```", path.read_text(), re.S)


def stored(path, query):
    with sqlite3.connect(path) as connection:
        return connection.execute(query).fetchall()


def shown(runner, component):
    (bolt,) = runner.component(component)
    return [tuple(tup) for tup in bolt.top()]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_every_example_runs_without_an_error(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    runner = LocalRunner(load_topology(str(path)))
    runner.run(0.05)
    runner.close()
    assert runner.errors == []


def test_word_count():
    runner = LocalRunner(load_topology(str(ROOT / "examples" / "word_count.py")))
    runner.run(0.05)
    runner.deactivate()
    runner.run_until_idle()
    top = shown(runner, "show")
    assert top[0][0] == "the"
    counted = sum(stats.executed for stats in runner.stats("count"))
    merged = {tup[0]: tup[1] for tup in runner.component("show")[0]._latest.values()}
    assert sum(merged.values()) == counted


def test_custom_grouping_keeps_regions_apart_except_for_alarms():
    runner = LocalRunner(load_topology(str(ROOT / "examples" / "custom_grouping.py")))
    runner.run(0.5)
    runner.deactivate()
    runner.run_until_idle()
    first, second = runner.component("watch")
    sensors = runner.stats("sensors")[0]
    assert sensors.emitted < first.readings + second.readings == sensors.sent, "alarms have a second copy"
    assert {"north", "south"} <= first.regions
    assert {"east", "west"} <= second.regions


def test_exactly_once_goes_on_after_a_crash(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = str(ROOT / "examples" / "exactly_once.py")
    topology = load_topology(path)
    orders = tmp_path / "exactly-once-demo" / "orders.csv"
    sys.modules["exactly_once"].make_orders(orders, 5_000)
    settings = dataclasses.replace(
        topology.settings,
        delivery=dataclasses.replace(topology.settings.delivery, guarantee="exactly_once", epoch_interval=0.003),
    )
    topology = dataclasses.replace(topology, settings=settings)
    killed = LocalRunner(topology, folder=str(tmp_path / "state"))
    while killed.commits.committed < 2:
        killed.run(0.001)
    again = LocalRunner(topology, folder=str(tmp_path / "state"))
    again.run_until_idle()
    again.commit()
    rows = ds.dataset(tmp_path / "exactly-once-demo" / "orders", format="parquet").to_table()
    assert sorted(rows["order"].to_pylist()) == list(range(5_000))
    spent = Counter()
    for line in orders.read_text().splitlines():
        _, customer, amount = line.split(",")
        spent[customer] += int(amount)
    totals = {customer: total for bolt in again.component("totals") for customer, total in bolt.spent.items()}
    assert totals == spent


def test_online_shop(monkeypatch):
    topology = load_topology(str(ROOT / "examples" / "online_shop.py"))
    runner = LocalRunner(topology)
    module = sys.modules[type(topology.nodes["clicks"].component).__module__]
    monkeypatch.setattr(module.time, "time", runner.clock.now)  # the shop's clock is the simulated one
    for spout in runner.component("clicks"):
        spout.due = 0.0
    runner.run(3.5)
    runner.deactivate()
    runner.run(1.1)
    runner.run_until_idle()
    totals = dict(shown(runner, "shop"))
    clicks = runner.stats("clicks")[0].emitted
    assert clicks == pytest.approx(7_000, abs=10)
    assert totals["view"] + totals["cart"] + totals["buy"] == clicks
    users = {user for bolt in runner.component("visitors") for user in bolt.seen}
    assert totals["visitors"] == len(users)
    assert shown(runner, "top")[0][0] == "product 1"


def test_rolling_count(monkeypatch):
    topology = load_topology(str(ROOT / "examples" / "rolling_count.py"))
    runner = LocalRunner(topology)
    module = sys.modules[type(topology.nodes["words"].component).__module__]
    monkeypatch.setattr(module.time, "time", lambda: 20 * runner.clock.now())  # an hour of it is three minutes
    for spout in runner.component("words"):
        spout.due = 0.0
    runner.run(14.5 / 20)  # the window from 2 to 12 is over, and a slide more
    assert runner.errors == []
    word, end, count = shown(runner, "show")[0]
    assert (word, end) == ("word 1", 12)
    assert count == pytest.approx(10_000, rel=0.05), "half of all words"


def test_clean_orders():
    runner = LocalRunner(load_topology(str(ROOT / "examples" / "clean_orders.py")))
    runner.run(5.0)
    runner.deactivate()
    runner.run_until_idle()
    (source,) = runner.component("orders")
    once = runner.component("once")
    seen, dropped = sum(bolt.seen for bolt in once), sum(bolt.dropped for bolt in once)
    assert seen == runner.stats("orders")[0].emitted >= 2_400
    assert 0 <= dropped - (seen - len(source.sent)) <= 5, "copies, and new ones by mistake: one in a thousand"
    assert not any(bolt.memory.early for bolt in once)
    (total,) = runner.component("total")
    spent = sum(cents for _, _, cents in source.sent)
    assert 0.99 * spent <= sum(total.partials["cents"].values()) <= spent


def test_the_code_of_the_page_on_duplicates_runs_as_it_stands():
    (code,) = code_blocks(ROOT / "docs" / "how-to" / "dedup.md")
    builder = TopologyBuilder()
    builder.set_spout("orders", FeederSpout(("order", int), ("customer", str), ("cents", int)))
    exec(code, {"builder": builder, "DedupBolt": DedupBolt})
    runner = LocalRunner(builder.build("t"))
    runner.feed("orders", [[1, "a", 5], [1, "a", 5], [2, "a", 5]])
    runner.run_until_idle()
    assert sum(bolt.dropped for bolt in runner.component("once")) == 1
    assert all(bolt.memory.shape.bytes < 2_000_000 for bolt in runner.component("once")), "as the page says"


def test_stored_averages(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    runner = LocalRunner(load_topology(str(ROOT / "examples" / "stored_averages.py")))
    runner.run(2.0)
    runner.deactivate()
    runner.run_until_idle()
    runner.close()
    assert runner.errors == []
    assert stored("averages.db", "SELECT SUM(readings) FROM averages") == [(runner.stats("sensors")[0].emitted,)]
    (low, high) = stored("averages.db", "SELECT MIN(celsius), MAX(celsius) FROM averages WHERE readings > 100")[0]
    assert 18 < low < high < 22


def test_the_code_of_the_page_on_persistence_runs_as_it_stands(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, *_ = code_blocks(ROOT / "docs" / "how-to" / "persist.md")
    (tmp_path / "shop.py").write_text(code)
    runner = LocalRunner(load_topology(str(tmp_path / "shop.py")), folder=str(tmp_path / "penstock-state"))
    runner.run(2.0)
    runner.deactivate()
    runner.commit()
    runner.close()
    assert runner.errors == []
    orders = range(1, runner.stats("orders")[0].emitted + 1)
    spent = Counter()
    for number in orders:
        spent[f"customer-{number % 100}"] += number % 9000
    assert len(orders) >= 4000
    assert dict(stored("shop.db", "SELECT customer, cents FROM revenue")) == spent


def test_the_code_of_the_readme_runs_as_it_stands(tmp_path):
    (code,) = code_blocks(ROOT / "README.md")
    assert code_blocks(ROOT / "docs" / "tutorial" / "index.md") == [code]
    assert 20 <= len([line for line in code.splitlines() if line.strip()]) <= 28
    (tmp_path / "wc.py").write_text(code)
    runner = LocalRunner(load_topology(str(tmp_path / "wc.py")))
    runner.run(0.02)
    assert runner.errors == []
    assert shown(runner, "show")


def test_the_code_of_the_tutorial_runs_as_it_stands(tmp_path, monkeypatch):
    (readme,) = code_blocks(ROOT / "README.md")
    bolt, unit, whole, wiring, batch, keeps = code_blocks(ROOT / "docs" / "tutorial" / "bolt.md")
    imports, rest = readme.split("\n\n", 1)
    classes, builder = rest.split("builder = ", 1)
    builder = re.sub(r'builder.set_bolt\("count".*\n', wiring.replace("\\", "\\\\"), builder)
    (tmp_path / "wc.py").write_text("\n".join([imports, batch, classes, bolt, "builder = " + builder]))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "wc", raising=False)
    for test in (unit, whole):
        names = {}
        exec(test, names)
        for name, function in names.items():
            if name.startswith("test_"):
                function()
    topology = load_topology(str(tmp_path / "wc.py"))
    assert list(topology.nodes) == ["sentences", "split", "long", "count", "show"]
    from penstock.testing import run_bolt

    out = run_bolt(sys.modules["wc"].LongWordsBatch(), [("word", str)], [["a"], ["moon"]])
    assert [tup.word for tup in out] == ["moon"]
    kept = re.sub(r".*self.counts = Counter\(\)\n", keeps, readme)
    assert "context.state.map" in kept
    (tmp_path / "kept.py").write_text(kept)
    runner = LocalRunner(load_topology(str(tmp_path / "kept.py")))
    runner.run(0.02)
    assert runner.errors == []
    assert shown(runner, "show")


def test_the_code_of_the_page_on_aggregates_runs_as_it_stands(tmp_path):
    blocks = code_blocks(ROOT / "docs" / "how-to" / "aggregate.md")
    sales, own = (code for code in blocks if "Reduce(" in code or "(Merge)" in code)
    (tmp_path / "sales.py").write_text(sales)
    runner = LocalRunner(load_topology(str(tmp_path / "sales.py")))
    runner.run_until_idle()
    assert shown(runner, "show") == [("tea", 2, 6.0, 3.0, 2)]
    names = {}
    exec(own, names)
    longest = names["Longest"]("word")
    assert longest.result(longest.merge(longest.total(["a", "abc"]), longest.total(["ab"]))) == 3
    (owners,) = (code for code in blocks if "(KeyedAggregate)" in code)
    exec(sales, names)
    exec(owners, names)
    runner = LocalRunner(names["topology_with_owners"])
    runner.run_until_idle()
    assert sorted(shown(runner, "shown")) == [("ann", 2, 2), ("bob", 1, 1)]


def test_the_sink_of_the_page_on_sinks_writes_every_row_once(tmp_path):
    (code,) = code_blocks(ROOT / "docs" / "how-to" / "sink.md")
    names = {}
    exec(code, names)
    rows = [[f"customer-{number}", number] for number in range(100)]
    builder = TopologyBuilder()
    builder.set_spout("orders", FeederSpout(("customer", str), ("cents", int), rows=rows))
    builder.set_bolt("sink", names["SQLiteSink"](str(tmp_path / "shop.db"))).global_grouping("orders")
    topology = builder.build("shop", Settings(delivery=Delivery("exactly_once")))
    runner = LocalRunner(topology, folder=str(tmp_path / "state"))
    runner.run_until_idle()
    runner.commit()
    runner.close()
    again = LocalRunner(topology, folder=str(tmp_path / "state"))
    again.run_until_idle()
    again.close()
    assert runner.errors == again.errors == []
    assert sorted(stored(tmp_path / "shop.db", "SELECT * FROM totals")) == sorted(map(tuple, rows))


@pytest.mark.parametrize("page", sorted(ROOT.glob("*.md")), ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    """``make docs`` checks the links between the pages of the site."""
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / target).exists(), target
