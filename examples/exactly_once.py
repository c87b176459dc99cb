"""Exactly once from end to end: orders from a file, totals in state, rows in Parquet files, committed epoch by
epoch.

    penstock run examples/exactly_once.py --set delivery=exactly_once --set delivery.epoch_interval=2

Kill it in any way and start it again with the same command: it continues from the last commit, and
``exactly-once-demo/orders`` contains every order once. The first start creates the file of orders.
"""

import random
from pathlib import Path

from penstock import BasicBolt, TopologyBuilder
from penstock.connectors import FileSpout, ParquetSink

FOLDER = Path("exactly-once-demo")


def make_orders(path, count=200_000):
    rng = random.Random(1)
    path.parent.mkdir(exist_ok=True)
    with path.open("w") as file:
        for number in range(count):
            file.write(f"{number},customer-{rng.randrange(1000)},{rng.randrange(1, 500)}\n")


class Parse(BasicBolt):
    def declare_output_fields(self, declarer):
        declarer.declare(("order", int), ("customer", str), ("amount", int))

    def execute(self, tup, collector):
        order, customer, amount = tup.line.split(",")
        collector.emit([int(order), customer, int(amount)])


class Totals(BasicBolt):
    """The amount that each customer has spent. The map is state: it is committed with the epoch and survives a
    crash."""

    def declare_output_fields(self, declarer):
        declarer.declare(("order", int), ("customer", str), ("amount", int), ("total", int))

    def prepare(self, conf, context):
        self.spent = context.state.map("spent", default=0)

    def execute(self, tup, collector):
        self.spent[tup.customer] += tup.amount
        collector.emit([*tup, self.spent[tup.customer]])


def topology():
    orders = FOLDER / "orders.csv"
    if not orders.exists():
        make_orders(orders)
    builder = TopologyBuilder()
    builder.set_spout("orders", FileSpout(str(orders)))
    builder.set_bolt("parse", Parse()).shuffle_grouping("orders")
    builder.set_bolt("totals", Totals(), 2).fields_grouping("parse", "customer")
    builder.set_bolt("sink", ParquetSink(FOLDER / "orders")).shuffle_grouping("totals")
    return builder.build("exactly-once")
