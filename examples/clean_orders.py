"""Removes duplicate orders. A shop's servers sometimes send an order twice; the second one is dropped before
counting.

The bolt "once" remembers the orders of the last minute. At worst it mistakes one new order in a thousand for a
known one. The live view shows how many it has dropped.
"""

import random

from penstock import DedupBolt, Reduce, ShowBolt, Spout, TopologyBuilder
from penstock.aggregates import Count, Sum


class Orders(Spout):
    """Emits about 500 orders per second; every fifth is a copy of one of the last hundred."""

    def declare_output_fields(self, declarer):
        declarer.declare(("order", int), ("customer", str), ("cents", int))

    def open(self, conf, context, collector):
        self.collector, self.random, self.sent = collector, random.Random(context.task), []

    def next_tuple(self):
        if len(self.sent) > 100 and self.random.random() < 0.2:
            order = self.random.choice(self.sent[-100:])
        else:
            order = [len(self.sent), f"customer {self.random.randrange(50)}", self.random.randrange(100, 10_000)]
            self.sent.append(order)
        self.collector.emit(order)


revenue = Reduce("customer", orders=Count(), cents=Sum("cents"))
once = DedupBolt(("order", int), ("customer", str), ("cents", int), by="order", period=60, capacity=20_000)

builder = TopologyBuilder()
builder.set_spout("orders", Orders()).set_max_rate(500)
builder.set_bolt("once", once, 2).fields_grouping("orders", "order")
builder.set_bolt("count", revenue.partials(), 2).shuffle_grouping("once")
builder.set_bolt("total", revenue.merged()).fields_grouping("count", "customer")
builder.set_bolt("show", ShowBolt()).local_or_shuffle_grouping("total")
topology = builder.build("clean-orders")
