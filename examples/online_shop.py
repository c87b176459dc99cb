"""An online shop: from events ⟨user, product, action, time⟩ it computes counts per action, unique visitors and the
top products of the last ten seconds."""

import random
import time
from collections import Counter, deque

from penstock import BasicBolt, ShowBolt, Spout, TopologyBuilder

ACTIONS = ["view", "view", "view", "view", "cart", "cart", "buy"]


class Clicks(Spout):
    """Simulates the shop's web servers: about 2,000 clicks per second; some products are far more popular than
    others."""

    def declare_output_fields(self, declarer):
        declarer.declare(("user", int), ("product", str), ("action", str), ("time", float))

    def open(self, conf, context, collector):
        self.collector, self.random = collector, random.Random(context.task)
        self.gap = 1 / float(conf.get("clicks_per_second", 2000))

    def activate(self):
        self.due = time.time()

    def next_tuple(self):
        if time.time() < self.due:
            return
        self.due += self.gap
        product = f"product {int(self.random.paretovariate(1))}"
        self.collector.emit([self.random.randrange(10_000), product, self.random.choice(ACTIONS), self.due])


class ActionCount(BasicBolt):
    """Counts actions. With partial key grouping, two tasks may each hold a partial of a count."""

    def declare_output_fields(self, declarer):
        declarer.declare(("action", str), ("count", int))

    def prepare(self, conf, context):
        self.counts = Counter()

    def execute(self, tup, collector):
        if tup.is_tick:
            for action, count in self.counts.items():
                collector.emit([action, count])
            self.counts.clear()
        else:
            self.counts[tup.action] += 1


class Total(BasicBolt):
    """Merges the partials."""

    def declare_output_fields(self, declarer):
        declarer.declare(("name", str), ("count", int))

    def prepare(self, conf, context):
        self.totals = Counter()

    def execute(self, tup, collector):
        self.totals[tup[0]] += tup[1]
        collector.emit([tup[0], self.totals[tup[0]]])


class UniqueVisitors(BasicBolt):
    """Counts new users. Each user belongs to one task (fields grouping), so the tasks' counts can be added."""

    def declare_output_fields(self, declarer):
        declarer.declare(("name", str), ("new", int))

    def prepare(self, conf, context):
        self.seen, self.new = set(), 0

    def execute(self, tup, collector):
        if tup.is_tick:
            if self.new:
                collector.emit(["visitors", self.new])
            self.new = 0
        elif tup.user not in self.seen:
            self.seen.add(tup.user)
            self.new += 1


class TopProducts(BasicBolt):
    """Counts purchases per product over a sliding window: one bucket per tick; the oldest is dropped."""

    def __init__(self, buckets=10):
        self.buckets = buckets

    def declare_output_fields(self, declarer):
        declarer.declare(("product", str), ("count", int))

    def prepare(self, conf, context):
        self.window = deque([Counter()], maxlen=self.buckets)

    def execute(self, tup, collector):
        if tup.is_tick:
            for product, count in sum(self.window, Counter()).most_common(5):
                collector.emit([product, count])
            self.window.append(Counter())
        elif tup.action == "buy":
            self.window[-1][tup.product] += 1


builder = TopologyBuilder()
builder.set_spout("clicks", Clicks())
builder.set_bolt("actions", ActionCount(), 2).partial_key_grouping("clicks", "action").set_tick_interval(1)
builder.set_bolt("visitors", UniqueVisitors(), 2).fields_grouping("clicks", "user").set_tick_interval(1)
builder.set_bolt("products", TopProducts(), 2).fields_grouping("clicks", "product").set_tick_interval(1)
builder.set_bolt("totals", Total()).global_grouping("actions").global_grouping("visitors")
builder.set_bolt("shop", ShowBolt()).global_grouping("totals")
builder.set_bolt("top", ShowBolt(5)).global_grouping("products")
topology = builder.build("online-shop")
