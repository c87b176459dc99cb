"""A keyed aggregate whose tasks own their keys, one of them overloaded by a hot key: on Spark, with real work."""

import pytest

from benchmarks.keyed_migration import expected, keyed_topology, owner_of_the_hot_key
from tests.helpers import wide

pytestmark = pytest.mark.spark

COUNT, SEED = 8_000, 3
PATIENCE = 60.0  # seconds, on a busy machine; it takes about two


def test_the_tuples_of_a_hot_key_go_to_a_light_task_and_the_results_are_exact(run, tmp_path):
    conf = {"delivery.guarantee": "exactly_once", "delivery.state_dir": str(tmp_path / "state")}
    topology = keyed_topology(COUNT, SEED, "migration", {**conf, "delivery.epoch_interval": 0.3})
    handle = run.submit(wide(topology))
    internals = handle.internals

    def merged():
        return {key: tuple(result) for key, *result in internals.bus.published().get("out", [])[1:]}

    assert internals.server.wait(lambda: len(merged()) > 0, PATIENCE), internals.bus.queues()
    assert merged() == expected(COUNT, SEED)
    routes = [each.text.partition(":")[0] for each in internals.migrations.decisions if "→" in each.text]
    assert routes, "one of two tasks had more than twice the work of the other"
    hot = owner_of_the_hot_key(SEED)
    assert f"parse/{hot} → parse/{1 - hot}" in routes
    nodes = {worker.hello.node for worker in internals.workers.values()}
    assert bool(internals.bus.load().links) == (len(nodes) > 1), "links are measured between nodes"
    assert handle.drain(30)
    assert internals.bus.segments(), "what went another way is on record"
