"""A topology with a ReplaySpout in its own process, for tests that kill it: python -m … FOLDER file|queue."""

from __future__ import annotations

import os
import sys

from penstock import BasicBolt, Delivery, Settings, TopologyBuilder
from penstock.connectors.file_eden import FileEden
from penstock.replay import QueueEden, ReplaySpout
from penstock.testing import LocalRunner


class Record(BasicBolt):
    """Writes each line to a file; raises on those that end with ``bad``, and in each process the first time on
    those that end with 7: there are fewer processes than attempts, so these are done with in the end."""

    def __init__(self, path):
        self._path = path

    def prepare(self, conf, context):
        self._out = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._seen = set()

    def execute(self, tup, collector):
        line = tup[0]
        if line.endswith("bad"):
            raise ValueError(f"cannot use {line}")
        if line.endswith("7") and line not in self._seen:
            self._seen.add(line)
            raise ValueError(f"not at first: {line}")
        os.write(self._out, f"{line}\n".encode())


def main(folder, source):
    eden = FileEden(f"{folder}/lines.txt") if source == "file" else QueueEden(f"{folder}/queue", ("line",))
    builder = TopologyBuilder()
    builder.set_spout("lines", ReplaySpout(eden, max_attempts=8))
    builder.set_bolt("record", Record(f"{folder}/seen.txt")).shuffle_grouping("lines")
    settings = Settings(delivery=Delivery("at_least_once", max_spout_pending=500, epoch_interval=0.2))
    runner = LocalRunner(builder.build("killed", settings), folder=f"{folder}/state")
    print("up", flush=True)
    while not os.path.exists(f"{folder}/stop"):
        runner.run(0.01)
    runner.deactivate()
    runner.run_until_idle()
    runner.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
