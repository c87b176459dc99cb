"""Which task owns a key, from the groupings of the inputs."""

import re

import msgspec
import pytest

from penstock import BasicBolt, CustomGrouping, Settings, TopologyBuilder
from penstock.plan.owners import OwnerRule, grouped_by, owner_rule, why_not_rescaled
from penstock.plan.planner import make_plan
from penstock.testing import FeederSpout
from penstock.topology.groupings import Fields


class Emits(BasicBolt):
    def declare_output_fields(self, declarer):
        declarer.declare("word", "n")
        declarer.declare("word", "n", stream="straight", direct=True)

    def execute(self, tup, collector):
        pass


class Mine(CustomGrouping):
    def choose(self, values):
        return []


class OwnFields(Fields):
    """A user's grouping, which may route in any way."""


def plan(group):
    builder = TopologyBuilder()
    builder.set_spout("s", FeederSpout("word", "n"))
    builder.set_bolt("emits", Emits()).shuffle_grouping("s")
    group(builder.set_bolt("bolt", Emits(), 2))
    return make_plan(builder.build("t", Settings()))


RULES = {
    "fields": (lambda bolt: bolt.fields_grouping("s", "word"), OwnerRule(fields=1)),
    "two fields": (lambda bolt: bolt.fields_grouping("s", "n", "word"), OwnerRule(fields=2)),
    "two inputs": (
        lambda bolt: bolt.fields_grouping("s", "word").fields_grouping("emits", "n"),
        OwnerRule(fields=1),
    ),
    "a control stream": (
        lambda bolt: bolt.all_grouping("emits").fields_grouping("s", "word"),
        OwnerRule(fields=1),
    ),
    "global": (lambda bolt: bolt.global_grouping("s"), OwnerRule(first=True)),
    "shuffle": (lambda bolt: bolt.shuffle_grouping("s").none_grouping("emits"), OwnerRule()),
    "near": (lambda bolt: bolt.local_or_shuffle_grouping("s"), OwnerRule()),
    "partial key": (lambda bolt: bolt.partial_key_grouping("s", "word"), OwnerRule()),
}


@pytest.mark.parametrize("case", RULES)
def test_groupings_that_tell(case):
    group, expected = RULES[case]
    found = plan(group)
    assert owner_rule(found, "bolt") == expected
    assert why_not_rescaled(found, "bolt") == ""
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(expected), type=OwnerRule) == expected, (
        "as commands carry it"
    )


REASONS = {
    "all": (lambda bolt: bolt.all_grouping("s"), "reads 's' by all grouping, which does not assign keys to tasks"),
    "all beside shuffle": (lambda bolt: bolt.shuffle_grouping("s").all_grouping("emits"), "reads 'emits' by all"),
    "direct": (lambda bolt: bolt.direct_grouping("emits", stream="straight"), "reads 'emits' by direct grouping"),
    "custom": (lambda bolt: bolt.grouping("s", Mine()), "reads 's' by custom grouping"),
    "derived": (
        lambda bolt: bolt.grouping("s", OwnFields("word")),
        r"reads 's' by fields\(word\) grouping, which",
    ),
    "numbers of fields": (
        lambda bolt: bolt.fields_grouping("s", "word").fields_grouping("emits", "word", "n"),
        r"by fields\(word\) grouping and 'emits' by fields\(word, n\) grouping, which do not assign",
    ),
    "mixed": (
        lambda bolt: bolt.fields_grouping("s", "word").shuffle_grouping("emits"),
        "do not assign a key to the same task",
    ),
    "mixed with global": (
        lambda bolt: bolt.global_grouping("s").shuffle_grouping("emits"),
        "do not assign a key to the same task",
    ),
}


@pytest.mark.parametrize("case", REASONS)
def test_groupings_that_do_not(case):
    group, reason = REASONS[case]
    found = plan(group)
    assert owner_rule(found, "bolt") is None
    assert re.search(reason, why_not_rescaled(found, "bolt"))


def test_spouts_do_not_scale():
    found = plan(lambda bolt: bolt.shuffle_grouping("s"))
    assert owner_rule(found, "s") is None
    assert "is a spout" in why_not_rescaled(found, "s")


def test_the_fields_an_input_is_grouped_by():
    assert grouped_by(plan(lambda bolt: bolt.fields_grouping("s", "n", "word")), "bolt") == ("n", "word")
    assert grouped_by(plan(lambda bolt: bolt.all_grouping("emits").fields_grouping("s", "n")), "bolt") == ("n",)
    assert grouped_by(plan(lambda bolt: bolt.partial_key_grouping("s", "n")), "bolt") == ()
    assert grouped_by(plan(lambda bolt: bolt.shuffle_grouping("s")), "s") == ()


def test_the_first_task_has_all_behind_a_global_grouping():
    shares = [OwnerRule(first=True).share(index, 3, 2) for index in range(2)]
    assert [share.sources for share in shares] == [(0, 1, 2), ()]
    assert [[share.succeeds(source) for source in range(3)] for share in shares] == [[True] * 3, [False] * 3]
