"""What the machine under a process tells: its size, the Spark executor beside us, the joules its processor counts.

Linux only; elsewhere, and where reading is forbidden, the figure is left out.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

_PROC = Path("/proc")
_POWERCAP = Path("/sys/class/powercap")
_MEASURED = ("package", "dram")
"""Domains of RAPL that add up: a package has its cores and what is near them, dram is beside it. ``psys`` would
have both once more."""


class MachineProbe:
    """``read`` is called now and then, by one thread at a time."""

    def __init__(self, jvm: int | None = None, proc: Path = _PROC, powercap: Path = _POWERCAP) -> None:
        self._jvm, self._proc = jvm, proc
        self._rapl = Rapl(powercap)
        self._id = _text(proc / "sys/kernel/random/boot_id")
        self._cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self._memory = self._total_memory()

    def read(self) -> dict[str, Any]:
        """``id``: the same in all containers and network namespaces of one machine. ``cores``, ``memory`` (bytes):
        what it has, whoever else is on it. ``jvm``: process, CPU seconds so far and resident bytes of the Spark
        executor's. ``rapl``: joules since the first ``read``, of all that runs on the machine."""
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
    """Intel's and AMD's energy counters. Since 2020 Linux lets only root read them."""

    def __init__(self, powercap: Path = _POWERCAP) -> None:
        self._domains = [
            folder
            for folder in sorted(powercap.glob("intel-rapl:*"))
            if _text(folder / "name").startswith(_MEASURED) and _text(folder / "energy_uj")
        ]
        self._last: dict[Path, int] = {}
        self._microjoules = 0

    def joules(self) -> float | None:
        """Since the first call; None: the machine does not tell. Must be called before a counter comes round
        twice, which takes a processor at full load minutes."""
        if not self._domains:
            return None
        for folder in self._domains:
            try:
                now = int(_text(folder / "energy_uj"))
                grown = now - self._last.get(folder, now)
                if grown < 0:  # it came round
                    grown += int(_text(folder / "max_energy_range_uj"))
            except ValueError:
                continue
            self._last[folder] = now
            self._microjoules += grown
        return self._microjoules / 1e6


def spark_jvm(proc: Path = _PROC) -> int | None:
    """The process of the Spark executor this one belongs to: the parent of our parent, the daemon."""
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
