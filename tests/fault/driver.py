"""The driver of the fault tests, a process of its own so that it can be killed: runs a topology until it finds the
stop file, and keeps a status file of whom there is to kill.

``python -m tests.fault.driver CONFIG.json``
"""

import json
import math
import os
import sys
import time

import psutil

from penstock import Settings, TopologyBuilder, submit
from penstock.errors import PenstockError
from penstock.spark.session import close_session, joined, open_session
from tests.fault.components import Count, Numbers, Parse, Pass, as_line
from tests.fault.scaler import Scaler


def topology(config):
    builder = TopologyBuilder()
    if "kafka" in config:
        from penstock.connectors.kafka import KafkaBolt, KafkaSink, KafkaSpout

        exactly = config["settings"]["delivery"] == "exactly_once"
        make_sink = KafkaSink if exactly else KafkaBolt
        sink = make_sink(config["kafka"], "out", value=as_line)
        builder.set_spout("lines", KafkaSpout(config["kafka"], "in"), 2)
        builder.set_bolt("pass", Parse(), 2).shuffle_grouping("lines")
    else:
        sink = _sink(config)
        numbers = Numbers(config["count"], config["rate"], owners=config.get("owners"))
        builder.set_spout("numbers", numbers, 2).set_max_rate(config.get("max_rate", math.inf))
        builder.set_bolt("pass", Pass(), 2).shuffle_grouping("numbers")
    builder.set_bolt("count", Count(), 2).fields_grouping("pass", "key")
    builder.set_bolt("sink", sink).shuffle_grouping("count")
    return builder.build("faults", Settings(**config["settings"]))


def _sink(config):
    if "persist" in config:
        from penstock.persist import PersistBolt, SQLiteStore

        return PersistBolt(SQLiteStore(config["persist"], "results"), flush_every=0.2, drain_for=20.0)
    from penstock.connectors.parquet import ParquetSink

    return ParquetSink(config["output"])


def status(config, running, **more):
    slots = {str(id): slot.hello.pid for id, slot in dict(running.slots).items() if slot.connected}
    children = psutil.Process().children(recursive=True)
    executors = [p.pid for p in children if "CoarseGrainedExecutorBackend" in " ".join(_command(p))]
    content = {
        "pid": os.getpid(),
        "state": running.state,
        "restarts": running.restarts,
        "slots": slots,
        "nodes": joined(open_session()),
        "executors": executors,
        "executed": running.bus.totals()["count"].executed,
        "committed": running.committed,
        "time": time.time(),
        **more,
    }
    temporary = config["status"] + ".new"
    with open(temporary, "w") as file:
        json.dump(content, file)
    os.replace(temporary, config["status"])


def _command(process):
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def main():
    with open(sys.argv[1]) as file:
        config = json.load(file)
    running = submit(topology(config), config.get("master"))
    scaler = Scaler(running, config) if "scale" in config else None
    try:
        hurries = False
        while not running.wait(0.05) and not os.path.exists(config["stop"]):
            status(config, running, **(scaler.status() if scaler else {}))
            if not hurries and os.path.exists(config.get("hurry", "")):
                hurries = True
                running.set_max_rate("numbers", math.inf)
        running.kill()
        status(config, running, done=True)
    except PenstockError as error:
        status(config, running, error=str(error))
        raise
    finally:
        close_session()


if __name__ == "__main__":
    main()
