"""Delivery on Spark: every tuple arrives once and in order between two tasks, for every shape of topology."""

import pytest

from penstock import TopologyBuilder
from tests.helpers import settings_with
from tests.integration.components import LastOfKey, Numbers, Pass, Witness

pytestmark = pytest.mark.spark


def finish(running, emitted):
    """Wait until the spouts have emitted all they have and nothing is in flight, then end."""
    assert running.internals.server.wait(lambda: running.internals.bus.totals()["numbers"].emitted == emitted, 120)
    assert running.drain(60)
    running.kill()
    assert running.state == "ended"


def settings(run, **more):
    return settings_with(conf={"folder": str(run.folder)}, **more)


def test_a_million_numbered_tuples_over_three_hops(run):
    builder = TopologyBuilder()
    builder.set_spout("numbers", Numbers(500_000), 2)
    builder.set_bolt("one", Pass(), 2).shuffle_grouping("numbers")
    builder.set_bolt("two", Pass(), 2).fields_grouping("one", "key")
    builder.set_bolt("witness", Witness(most=0), 2).shuffle_grouping("two")
    running = run.submit(builder.build("million", settings(run)))
    finish(running, 1_000_000)
    witnesses = run.witnessed("witness")
    assert sum(w["received"] for w in witnesses) == 1_000_000
    assert [w["disorder"] for w in witnesses] == [0, 0]
    for origin in ("1", "2"):
        once = sum(w["counts"][origin][1] for w in witnesses)
        doubled = [w["counts"][origin][2:] for w in witnesses]
        assert once == 500_000, "each number exactly once, over both witnesses"
        assert doubled == [[], []]
    totals = running.internals.bus.totals()
    assert {c: t.errors for c, t in totals.items()} == {"numbers": 0, "one": 0, "two": 0, "witness": 0}


def test_every_grouping(run):
    count = 3_000
    builder = TopologyBuilder()
    builder.set_spout("numbers", Numbers(count, direct_to="direct"), 2)
    builder.set_bolt("shuffle", Witness(), 2).shuffle_grouping("numbers")
    builder.set_bolt("fields", Witness(), 2).fields_grouping("numbers", "key")
    builder.set_bolt("partial", Witness(), 3).partial_key_grouping("numbers", "key")
    builder.set_bolt("all", Witness(), 2).all_grouping("numbers")
    builder.set_bolt("global", Witness(), 2).global_grouping("numbers")
    builder.set_bolt("none", Witness(), 2).none_grouping("numbers")
    builder.set_bolt("direct", Witness(), 2).direct_grouping("numbers", stream="direct")
    builder.set_bolt("local", Witness(), 2).local_or_shuffle_grouping("numbers")
    builder.set_bolt("custom", Witness(), 2).grouping("numbers", LastOfKey())
    running = run.submit(builder.build("groupings", settings(run)))
    finish(running, 2 * 2 * count)

    def received(component):
        return [w["received"] for w in run.witnessed(component)]

    for even in ("shuffle", "none"):
        first, second = received(even)
        assert first + second == 2 * count
        assert abs(first - second) <= 2, "at most one apart per source task"
    assert sum(received("fields")) == 2 * count
    one, other = (set(w["keys"]) for w in run.witnessed("fields"))
    assert not one & other
    assert len(one | other) == 10
    partial = run.witnessed("partial")
    for key in {key for w in partial for key in w["keys"]}:
        assert sum(key in w["keys"] for w in partial) <= 2
    assert sum(received("partial")) == 2 * count
    assert received("all") == [2 * count, 2 * count]
    assert received("global") == [2 * count, 0]
    assert sum(received("local")) == 2 * count
    for index, witness in enumerate(run.witnessed("direct")):
        assert all(n % 2 == index for _, _, _, _, n in witness["tuples"])
        assert witness["received"] == count
    for index, witness in enumerate(run.witnessed("custom")):
        assert all(int(key[-1]) % 2 == index for key in witness["keys"])
    assert sum(received("custom")) == 2 * count
    for component in ("shuffle", "fields", "partial", "all", "global", "none", "direct", "local", "custom"):
        assert all(w["disorder"] == 0 for w in run.witnessed(component)), component


def test_diamond_of_five_stages_with_relays_and_fused_groups(run):
    count = 5_000
    builder = TopologyBuilder()
    builder.set_spout("numbers", Numbers(count))
    builder.set_bolt("left", Pass(), 2).shuffle_grouping("numbers")
    builder.set_bolt("right", Pass()).shuffle_grouping("numbers")
    builder.set_bolt("deep", Pass(), 2).fields_grouping("right", "key")
    builder.set_bolt("fused", Pass(), 2).local_or_shuffle_grouping("deep")
    builder.set_bolt("join", Pass(), 2).fields_grouping("left", "key").fields_grouping("fused", "key")
    builder.set_bolt("witness", Witness()).shuffle_grouping("join").shuffle_grouping("numbers")
    builder.set_bolt("sink", Witness()).shuffle_grouping("left")
    topology = builder.build("diamond", settings(run))
    running = run.submit(topology)
    assert len(running.internals.plan.stages) == 5
    finish(running, count)
    (witness,) = run.witnessed("witness")
    # Three ways lead from the spout to the witness: left, right and straight.
    assert witness["counts"]["1"][3] == count
    (sink,) = run.witnessed("sink")
    assert sink["counts"]["1"][1] == count


def test_two_topologies_at_once(run):
    def make(name, count):
        builder = TopologyBuilder()
        builder.set_spout("numbers", Numbers(count))
        builder.set_bolt(name, Witness(most=0)).shuffle_grouping("numbers")
        return builder.build(name, settings(run))

    first = run.submit(make("first", 20_000))
    second = run.submit(make("second", 30_000))
    finish(first, 20_000)
    assert second.state == "active"
    finish(second, 30_000)
    assert run.witnessed("first")[0]["received"] == 20_000
    assert run.witnessed("second")[0]["received"] == 30_000


def test_deactivate_pauses_and_activate_resumes(run):
    builder = TopologyBuilder()
    builder.set_spout("numbers", Numbers(10**9))
    builder.set_bolt("witness", Witness(most=0)).shuffle_grouping("numbers")
    running = run.submit(builder.build("pause", settings(run)))

    def executed():
        return running.internals.bus.totals()["witness"].executed

    assert running.internals.server.wait(lambda: executed() > 0, 20)
    running.deactivate()
    assert running.drain(30)
    paused = executed()
    assert running.drain(5)
    assert executed() == paused
    running.activate()
    assert running.internals.server.wait(lambda: executed() > paused, 20)
    running.kill()
    assert run.witnessed("witness")[0]["received"] == executed()
