"""The driver of the fault tests, in its own process so that it can be killed: runs a topology until it finds the
stop file, and maintains a status file with the processes that a test may kill.

``python -m tests.fault.driver CONFIG.json``
"""

import faulthandler
import json
import math
import os
import signal
import sys
import time

import psutil

from penstock import TopologyBuilder, submit
from penstock.errors import PenstockError
from penstock.spark.session import close_session, joined
from tests.fault.components import Count, CountAlong, Numbers, OtherParse, OtherPass, Parse, Pass, as_line
from tests.fault.scaler import Scaler
from tests.helpers import settings_with, wide


def topology(config):
    if "chaos" in config:
        return chaos_topology(config)
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
    return builder.build(config["name"], settings_with(**config["settings"]))


def chaos_topology(config):
    """From the campaign's source to its sink; ``version`` 1 has the same bolts as changed code."""
    chaos, changed = config["chaos"], config.get("version", 0) % 2 == 1
    builder = TopologyBuilder()
    spout = _chaos_source(config)
    builder.set_spout("source", spout, 2).set_max_rate(config["max_rate"])
    if chaos["source"] == "numbers":
        parse = OtherPass() if changed else Pass()
    else:
        parse = OtherParse() if changed else Parse()
    builder.set_bolt("pass", parse, 2).shuffle_grouping("source")
    builder.set_bolt("count", CountAlong(), 2).fields_grouping("pass", "key")
    builder.set_bolt("sink", _chaos_sink(config)).shuffle_grouping("count")
    return builder.build(config["name"], settings_with(**config["settings"]))


def _chaos_source(config):
    chaos = config["chaos"]
    if chaos["source"] == "numbers":
        return Numbers(config["count"], config["rate"])
    if chaos["source"] == "files":
        from penstock.connectors.files import FileSpout

        return FileSpout(f"{chaos['files']}/*.txt")
    from penstock.connectors.kafka import KafkaSpout

    return KafkaSpout(chaos["bootstrap"], chaos["topic_in"])


def _chaos_sink(config):
    chaos = config["chaos"]
    if chaos["sink"] == "parquet":
        from penstock.connectors.parquet import ParquetSink

        return ParquetSink(config["output"])
    if chaos["sink"] == "postgres":
        from penstock.connectors.postgres import PostgresSink

        return PostgresSink(chaos["dsn"], chaos["table"])
    from penstock.connectors.kafka import KafkaBolt, KafkaSink

    make = KafkaSink if config["settings"]["delivery"] == "exactly_once" else KafkaBolt
    return make(chaos["bootstrap"], chaos["topic_out"], value=as_line)


def _sink(config):
    if "persist" in config:
        from penstock.persist import PersistBolt, SQLiteStore

        return PersistBolt(SQLiteStore(config["persist"], "results"), flush_every=0.2, drain_for=20.0)
    from penstock.connectors.parquet import ParquetSink

    return ParquetSink(config["output"])


_scanned = [0.0, [], []]


def status(config, running, **more):
    workers = {
        str(id): worker.hello.pid for id, worker in dict(running.internals.workers).items() if worker.connected
    }
    if time.monotonic() > _scanned[0] + config.get("scan", 0.0):
        commands = [(p.pid, " ".join(_command(p))) for p in psutil.Process().children(recursive=True)]
        jvms = [pid for pid, command in commands if "SparkSubmit" in command]
        executors = [pid for pid, command in commands if "CoarseGrainedExecutorBackend" in command]
        _scanned[:] = time.monotonic(), jvms, executors
    _, jvms, executors = _scanned
    content = {
        "pid": os.getpid(),
        "state": running.state,
        "restarts": running.internals.restarts,
        "workers": workers,
        "nodes": joined(
            running.internals.supervisor.engine.spark
        ),  # open_session() would ask the JVM for all its settings
        "executors": executors,
        "jvms": jvms,
        "executed": running.internals.bus.totals()["count"].executed,
        "committed": running.internals.committed,
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


def _take_over(config):
    """A second driver says that it means to end the first."""
    return {"take_over": True} if config.get("take_over") else {}


def main():
    with open(sys.argv[1]) as file:
        config = json.load(file)
    faulthandler.register(signal.SIGUSR1)
    running = submit(wide(topology(config)), config.get("master"), **_take_over(config))
    running.internals.load = lambda version: topology({**config, "version": int(version)})
    scaler = Scaler(running, config) if "scale" in config else None
    try:
        hurries = False
        while not running.wait(config.get("look", 0.05)) and not os.path.exists(config["stop"]):
            status(config, running, **(scaler.status() if scaler else {}))
            if not hurries and os.path.exists(config.get("hurry", "")):
                hurries = True
                running.set_max_rate(next(iter(running.internals.plan.spouts)), math.inf)
        running.kill()
        status(config, running, done=True)
    except PenstockError as error:
        status(config, running, error=str(error))
        raise
    finally:
        close_session()


if __name__ == "__main__":
    main()
