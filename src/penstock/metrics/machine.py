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
_MEASURED = ("package", "dram")
"""The RAPL domains to add up. A package includes its cores and uncore, and dram is separate. ``psys`` would count
both again."""


def usable_cores(groups: Path = _CGROUPS) -> int:
    """Return the number of cores that this process may use: those of its affinity, and not more than the CPU quota
    of its container, rounded up."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, period = [*_text(groups / "cpu.max").split(), "", ""][:2]  # cgroup v2
    if not quota:
        quota, period = _text(groups / "cpu/cpu.cfs_quota_us"), _text(groups / "cpu/cpu.cfs_period_us")
    try:
        share = int(quota) / int(period)
    except (ValueError, ZeroDivisionError):  # "max", or no cgroup
        return cores
    return max(1, min(cores, math.ceil(share))) if share > 0 else cores


class MachineProbe:
    """Reads the figures of this machine. ``read`` is called periodically, by one thread at a time."""

    def __init__(self, jvm: int | None = None, proc: Path = _PROC, powercap: Path = _POWERCAP) -> None:
        self._jvm, self._proc = jvm, proc
        self._rapl = Rapl(powercap)
        self._id = _text(proc / "sys/kernel/random/boot_id")
        self._cores = usable_cores()
        self._memory = self._total_memory()

    def read(self) -> dict[str, Any]:
        """Read the figures.

        - ``id``: identifies the machine; the same in all its containers and network namespaces.
        - ``cores``, ``memory`` (bytes): the size of the machine, regardless of what else runs on it.
        - ``jvm``: process id, CPU seconds so far and resident bytes of the Spark executor.
        - ``rapl``: joules of the whole machine since the first ``read``.
        """
        found: dict[str, Any] = {"id": self._id, "cores": self._cores, "memory": self._memory}
        if self._jvm is not None:
            use = self._use(self._jvm)
            if use is not None:
                found["jvm"] = [self._jvm, *use]
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
    try:
        jvm = int(_text(proc / f"{os.getppid()}/stat").rpartition(")")[2].split()[1])
    except (ValueError, IndexError):
        return None
    return jvm if _text(proc / f"{jvm}/comm") == "java" else None


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
