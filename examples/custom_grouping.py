"""A custom grouping: readings go to the task responsible for their region, extreme ones to all tasks."""

import random

from penstock import BasicBolt, CustomGrouping, ShowBolt, Spout, TopologyBuilder

REGIONS = ["north", "east", "south", "west"]


class ByRegion(CustomGrouping):
    def prepare(self, targets):
        self.tasks = targets.tasks  # ids of the subscribing tasks, lowest first

    def choose(self, values):
        region, degrees = values
        if degrees > 45:
            return self.tasks  # an alarm: every task receives a copy
        return [self.tasks[REGIONS.index(region) % len(self.tasks)]]


class Sensors(Spout):
    def declare_output_fields(self, declarer):
        declarer.declare(("region", str), ("degrees", float))

    def open(self, conf, context, collector):
        self.collector, self.random = collector, random.Random(context.task)

    def next_tuple(self):
        self.collector.emit([self.random.choice(REGIONS), self.random.gauss(20, 8)])


class Watch(BasicBolt):
    def declare_output_fields(self, declarer):
        declarer.declare(("task", str), ("regions", str), ("readings", int))

    def prepare(self, conf, context):
        self.name, self.regions, self.readings = f"task {context.task}", set(), 0

    def execute(self, tup, collector):
        self.regions.add(tup.region)
        self.readings += 1
        if self.readings % 1000 == 0:
            collector.emit([self.name, " ".join(sorted(self.regions)), self.readings])


builder = TopologyBuilder()
builder.set_spout("sensors", Sensors())
builder.set_bolt("watch", Watch(), 2).grouping("sensors", ByRegion())
builder.set_bolt("show", ShowBolt()).global_grouping("watch")
topology = builder.build("custom-grouping")
