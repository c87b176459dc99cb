"""Reads figures of the machine: its size, the JVM of the Spark executor, and the energy counters of the processor.

Linux only. On other systems, or without permission to read them, the figures are omitted.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

_PROC = Path("/proc")
_POWERCAP = Path("/sys/class/powercap")
_CGROUPS = Path("/sys/fs/cgroup")
NODE_CPUS = "PENSTOCK_NODE_CPUS"
"""Environment variable with the CPU limit of this node, in cores. ``penstock cluster up --cpus`` sets it, because
a process in a network namespace does not see its control group."""
_WORKER = "org.apache.spark.deploy.worker.Worker"
"""The main class of the JVM that starts Spark executors on a standalone node."""
_MEASURED = ("package", "dram")
"""The RAPL domains to add up. A package includes its cores and uncore, and dram is separate. ``psys`` would count
both again."""


def usable_cores(groups: Path = _CGROUPS) -> int:
    """Return the number of cores that this process may use: those of its affinity, and not more than the CPU quota
    of its container, rounded up."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cpu_quota(groups)
    return cores if quota is None else max(1, min(cores, math.ceil(quota)))


def cpu_quota(groups: Path = _CGROUPS, proc: Path = _PROC) -> float | None:
    """Return how many cores this process and all others of its node or container may use together, as the kernel
    enforces it. None if only the machine limits them."""
    told = os.environ.get(NODE_CPUS, "")
    found = [float(told)] if told.replace(".", "", 1).isdecimal() else []
    own = {
        name: path for _, name, path in (line.split(":", 2) for line in _text(proc / "self/cgroup").splitlines())
    }
    for below in {"", own.get("", "/").lstrip("/")}:  # version 2; in a container its own group is the root
        found.append(_share(*[*_text(groups / below / "cpu.max").split(), "", ""][:2]))
    v1 = next((path for name, path in own.items() if "cpu" in name.split(",")), "/")
    for below in {"", v1.lstrip("/")}:
        folder = groups / "cpu" / below
        found.append(_share(_text(folder / "cpu.cfs_quota_us"), _text(folder / "cpu.cfs_period_us")))
    return min((each for each in found if each > 0), default=None)


def _share(quota: str, period: str) -> float:
    """Cores; 0 for no limit."""
    try:
        return max(0.0, int(quota) / int(period))
    except (ValueError, ZeroDivisionError):  # "max", or no cgroup
        return 0.0


class MachineProbe:
    """Reads the figures of this machine. ``read`` is called periodically, by one thread at a time."""

    def __init__(self, jvm: int | None = None, proc: Path = _PROC, powercap: Path = _POWERCAP) -> None:
        self._jvm, self._proc = jvm, proc
        self._spark = _spark_processes(jvm, proc)
        self._rapl = Rapl(powercap)
        self._id = _text(proc / "sys/kernel/random/boot_id")
        self._cores, self._quota = usable_cores(), cpu_quota()
        self._memory = self._total_memory()

    def read(self) -> dict[str, Any]:
        """Read the figures.

        - ``id``: identifies the machine; the same in all its containers and network namespaces.
        - ``cores``, ``memory`` (bytes): the size of the machine, regardless of what else runs on it.
        - ``quota``: the cores that this node may use, if they are limited: its own, not shared with other nodes.
        - ``jvm``: process id of the Spark executor, and CPU seconds so far and resident bytes of the processes of
          Spark: the executor's JVM, the JVM of the standalone worker that started it, and the PySpark daemon.
        - ``rapl``: joules of the whole machine since the first ``read``.
        """
        found: dict[str, Any] = {"id": self._id, "cores": self._cores, "memory": self._memory}
        if self._quota is not None:
            found["quota"] = self._quota
        uses = [use for use in map(self._use, self._spark) if use is not None]
        if uses:
            found["jvm"] = [self._jvm, sum(seconds for seconds, _ in uses), sum(size for _, size in uses)]
        joules = self._rapl.joules()
        if joules is not None:
            found["rapl"] = joules
        return found

    def _use(self, process: int) -> tuple[float, int] | None:
        try:
            fields = _text(self._proc / f"{process}/stat").rpartition(")")[2].split()
            ticks, pages = int(fields[11]) + int(fields[12]), int(fields[21])
        except (ValueError, IndexError):
            return None
        return ticks / os.sysconf("SC_CLK_TCK"), pages * os.sysconf("SC_PAGE_SIZE")

    def _total_memory(self) -> int:
        for line in _text(self._proc / "meminfo").splitlines():
            if line.startswith("MemTotal:"):
                return int(line.split()[1]) * 1024
        return 0


class Rapl:
    """The energy counters of Intel and AMD processors. Since 2020 Linux permits only root to read them."""

    def __init__(self, powercap: Path = _POWERCAP) -> None:
        self._domains = [
            folder
            for folder in sorted(powercap.glob("intel-rapl:*"))
            if _text(folder / "name").startswith(_MEASURED) and _text(folder / "energy_uj")
        ]
        self._last: dict[Path, int] = {}
        self._microjoules = 0

    def joules(self) -> float | None:
        """Joules since the first call. None if the machine has no counters. Must be called before a counter wraps
        around twice, which takes minutes at full load."""
        if not self._domains:
            return None
        for folder in self._domains:
            try:
                now = int(_text(folder / "energy_uj"))
                increase = now - self._last.get(folder, now)
                if increase < 0:  # the counter has wrapped around
                    increase += int(_text(folder / "max_energy_range_uj"))
            except ValueError:
                continue
            self._last[folder] = now
            self._microjoules += increase
        return self._microjoules / 1e6


def spark_jvm(proc: Path = _PROC) -> int | None:
    """The process id of the Spark executor to which this process belongs: the parent of its parent, the PySpark
    daemon."""
    return _java_parent(os.getppid(), proc)


def _spark_processes(jvm: int | None, proc: Path) -> list[int]:
    """The processes of Spark on this node, as far as they are known from here: the executor's JVM first."""
    if jvm is None:
        return []
    found = [jvm]
    if os.getppid() not in (jvm, os.getpid()) and _java_parent(os.getppid(), proc) == jvm:
        found.append(os.getppid())
    worker = _java_parent(jvm, proc)
    return [*found, worker] if worker is not None and _WORKER in _text(proc / f"{worker}/cmdline") else found


def _java_parent(process: int, proc: Path) -> int | None:
    """The parent of a process, if it is a JVM."""
    try:
        parent = int(_text(proc / f"{process}/stat").rpartition(")")[2].split()[1])
    except (ValueError, IndexError):
        return None
    return parent if _text(proc / f"{parent}/comm") == "java" else None


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
