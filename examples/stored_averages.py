"""Averages sensor readings per sensor and minute, and stores them in SQLite without waiting for the database.

The rows are put into a queue on disk and written in bulk. Watch them arrive:
    sqlite3 averages.db 'SELECT * FROM averages ORDER BY minute DESC LIMIT 5'
"""

import random
import time

from penstock import BasicBolt, Delivery, Settings, Spout, TopologyBuilder
from penstock.persist import PersistBolt, SQLiteStore


class Sensors(Spout):
    def declare_output_fields(self, declarer):
        declarer.declare("sensor", "time", "celsius")

    def open(self, conf, context, collector):
        self.collector, self.number = collector, 0

    def next_tuple(self):
        self.number += 1
        reading = [f"sensor-{random.randrange(20)}", time.time(), random.gauss(20.0, 3.0)]
        self.collector.emit(reading, msg_id=self.number)


class Average(BasicBolt):
    def declare_output_fields(self, declarer):
        declarer.declare("sensor", "minute", "readings", "celsius")

    def prepare(self, conf, context):
        self.sums = context.state.map("sums", default=(0, 0.0))

    def execute(self, tup, collector):
        minute = time.strftime("%Y-%m-%d %H:%M", time.gmtime(tup.time))
        readings, total = self.sums[tup.sensor, minute]
        readings, total = readings + 1, total + tup.celsius
        self.sums[tup.sensor, minute] = (readings, total)
        collector.emit([tup.sensor, minute, readings, total / readings])


store = SQLiteStore("averages.db", "averages", key=["sensor", "minute"])  # a newer row replaces an older one

builder = TopologyBuilder()
builder.set_spout("sensors", Sensors()).set_max_rate(2_000)
builder.set_bolt("average", Average(), 2).fields_grouping("sensors", "sensor")
builder.set_bolt("store", PersistBolt(store)).fields_grouping("average", "sensor")
topology = builder.build("stored-averages", Settings(delivery=Delivery("at_least_once")))
