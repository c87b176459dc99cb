"""Workers count what goes from task to task."""

from penstock import TopologyBuilder
from penstock.testing import CaptureBolt, FeederSpout, LocalRunner
from tests.helpers import Pass


def counted(runner):
    """By component and number: workers keep task ids."""
    plan = runner.plan
    return {
        (plan.task[source].key, plan.task[target].key): (tuples, size)
        for worker in runner.workers.values()
        for source, target, tuples, size in worker._sender.streams()
    }


def test_tuples_and_bytes_of_each_pair():
    builder = TopologyBuilder()
    builder.set_spout("words", FeederSpout("word"))
    builder.set_bolt("split", Pass("word"), 2).shuffle_grouping("words")
    builder.set_bolt("show", CaptureBolt()).global_grouping("split")
    runner = LocalRunner(builder.build("t"))
    for _ in range(10):
        runner.feed("words", [("w",)])
        runner.run_until_idle()
    streams = counted(runner)
    assert {pair: tuples for pair, (tuples, _) in streams.items()} == {
        ("words/0", "split/0"): 5,
        ("words/0", "split/1"): 5,
        ("split/0", "show/0"): 5,
        ("split/1", "show/0"): 5,
    }
    sent = [stats.sent_bytes for name in ("words", "split") for stats in runner.stats(name)]
    assert sum(size for _, size in streams.values()) == sum(sent) > 0


def test_what_stays_in_the_worker_is_counted_too():
    builder = TopologyBuilder()
    builder.set_spout("words", FeederSpout("word"))
    builder.set_bolt("show", CaptureBolt()).local_or_shuffle_grouping("words")
    runner = LocalRunner(builder.build("t"))
    assert runner.plan.workers == 1
    runner.feed("words", [("w",)])
    runner.run_until_idle()
    ((pair, (tuples, size)),) = counted(runner).items()
    assert (pair, tuples) == (("words/0", "show/0"), 1)
    assert size > 0
