"""A Spark cluster for tests and experiments, whose nodes can be added, drained and killed.

>>> with SparkCluster(nodes=2, link="100mbit") as cluster:
...     running = submit(topology, cluster.master)
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Self

from penstock.cluster import manage, processes
from penstock.cluster.manage import ClusterPlan, Progress
from penstock.cluster.record import ClusterNode, ClusterRecord
from penstock.spark.java import ensure_java

_DOWN = "from penstock.cluster import manage; manage.down()"


class SparkCluster:
    """A cluster as started by ``penstock cluster up``. It is started by ``with`` and removed at the end of the
    block, also if Python is killed.

    Inside the block ``XDG_RUNTIME_DIR`` is a temporary folder. So the cluster is independent of the user's own
    cluster, and child processes find this one."""

    def __init__(
        self,
        nodes: int = 2,
        link: str = ClusterPlan.link,
        slots: int = ClusterPlan.slots,
        memory: str = ClusterPlan.memory,
        plain: bool = False,
        progress: Progress = lambda line: None,
        cpus: float | None = None,
    ) -> None:
        """``cpus``: cores that the processes of each node may use together."""
        self.plan = ClusterPlan(nodes, link, slots, memory, plain, cpus)
        self._progress = progress
        self._before: str | None = None
        self._folder: Path | None = None
        self._watcher: subprocess.Popen[bytes] | None = None

    @property
    def record(self) -> ClusterRecord:
        """The cluster's current record."""
        return manage.statuses()[0]

    @property
    def master(self) -> str:
        """The master's URL, for ``submit`` and ``penstock run --master``."""
        return self.record.url

    @property
    def nodes(self) -> list[str]:
        return [node.name for node in self.record.nodes]

    def __enter__(self) -> Self:
        self._before = os.environ.get("XDG_RUNTIME_DIR")
        self._folder = Path(tempfile.mkdtemp(prefix="penstock-runtime-"))
        os.environ["XDG_RUNTIME_DIR"] = str(self._folder)
        self._watcher = _watch(self._folder)
        try:
            manage.up(self.plan, ensure_java(), self._progress)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        assert self._folder is not None and self._watcher is not None and self._watcher.stdin is not None
        try:
            manage.down()
        finally:
            self._watcher.kill()
            self._watcher.wait()
            self._watcher.stdin.close()
            shutil.rmtree(self._folder, ignore_errors=True)
            if self._before is None:
                del os.environ["XDG_RUNTIME_DIR"]
            else:
                os.environ["XDG_RUNTIME_DIR"] = self._before

    def add(self, nodes: int = 1) -> list[ClusterNode]:
        """Start more nodes."""
        return manage.add(nodes, ensure_java(), self._progress)

    def lose(self, node: str) -> None:
        """Kill everything that runs on a node at once, like a power failure."""
        for process in processes.marked(self.record.key, node):
            processes.send(process, signal.SIGKILL)

    def node_of(self, pid: int) -> str | None:
        """The node that a process runs on."""
        return manage.node_of(pid)


def _watch(folder: Path) -> subprocess.Popen[bytes]:
    """Start a process that stops the cluster when this process ends for any reason: then the pipe closes."""
    script = (
        f"read line; {shlex.quote(sys.executable)} -P -c {shlex.quote(_DOWN)}; rm -rf {shlex.quote(str(folder))}"
    )
    return subprocess.Popen(["/bin/sh", "-c", script], stdin=subprocess.PIPE, start_new_session=True)
