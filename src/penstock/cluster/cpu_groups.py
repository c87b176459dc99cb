"""CPU limits of nodes, by control groups of Linux: version 2 (``cpu.max``) or version 1 (``cpu.cfs_quota_us``),
whichever the machine has the cpu controller in.

Each node has a group of its own in the cluster's group, which is directly below the root of the hierarchy. The
first process of a node joins the group before it becomes the Spark worker; all that it starts (the JVM of the
Spark executor, Python's daemon and workers) belongs to the group from then on. An empty group costs nothing, so
what a killed ``up`` leaves is removed by the next one.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import EnvironmentFault

_MOUNTS = Path("/proc/self/mounts")
_PERIOD = 100_000
"""Microseconds, the kernel's default: a node that has used up its share waits for the rest of the period."""
_LEAST_QUOTA = 1_000
"""Microseconds; the kernel accepts no less."""
_JOIN_SECONDS = 5.0  # until a started process must be in its group; usually a few milliseconds
_JOIN_INTERVAL = 0.002  # seconds between two checks for it
_REMOVE_SECONDS = 5.0  # for what a node leaves behind to end, on a busy machine
_PREFIX = "penstock-"
_HINT = (
    "This needs root and a writable /sys/fs/cgroup (in a container: --privileged). Without --cpus the nodes share "
    "the cores of the machine."
)


@dataclass(frozen=True)
class CpuGroups:
    """The groups of one cluster."""

    root: Path
    """Where the hierarchy with the cpu controller is mounted."""
    version: int
    tag: str
    """Of the cluster; part of its group's name."""

    @property
    def folder(self) -> Path:
        return self.root / f"{_PREFIX}{self.tag}"

    def group(self, node: str) -> Path:
        return self.folder / node

    def make(self, node: str, cpus: float) -> None:
        """Create the group of a node with its limit. Raises ``EnvironmentFault`` if that is not possible."""
        quota = max(_LEAST_QUOTA, round(cpus * _PERIOD))
        group = self.group(node)
        try:
            self.folder.mkdir(exist_ok=True)
            if self.version == 2:
                for above in (self.root, self.folder):
                    _enable_cpu(above)
            group.mkdir(exist_ok=True)
            if self.version == 2:
                (group / "cpu.max").write_text(f"{quota} {_PERIOD}")
            else:
                (group / "cpu.cfs_period_us").write_text(str(_PERIOD))
                (group / "cpu.cfs_quota_us").write_text(str(quota))
        except OSError as error:
            self.remove(node)
            what = f"control groups (version {self.version}) in {self.root} cannot be written"
            raise EnvironmentFault("cluster's CPU limits", f"{what}: {error.strerror}", _HINT) from error

    def inside(self, node: str, command: Sequence[str]) -> list[str]:
        """The command line that runs a command in the node's group. The shell joins the group and is then replaced
        by the command."""
        join = 'echo $$ > "$0" && exec "$@"'
        return ["sh", "-c", join, str(self.group(node) / "cgroup.procs"), *command]

    def await_joined(self, node: str) -> bool:
        """Wait until a process is in the node's group. Returns False if none is after the time limit."""
        deadline = time.monotonic() + _JOIN_SECONDS
        while not _members(self.group(node)):
            if time.monotonic() > deadline:
                return False
            time.sleep(_JOIN_INTERVAL)
        return True

    def throttled(self, node: str) -> float | None:
        """Seconds for which the node's processes have waited because of the limit. None if the node has none."""
        for line in _text(self.group(node) / "cpu.stat").splitlines():
            name, _, value = line.partition(" ")
            if name in ("throttled_usec", "throttled_time"):  # microseconds in version 2, nanoseconds in version 1
                return int(value) / (1e6 if self.version == 2 else 1e9)
        return None

    def remove(self, node: str | None = None) -> None:
        """Remove the group of a node, or all of the cluster's. A group whose processes do not end within
        ``_REMOVE_SECONDS`` stays: Python workers end a moment after the JVM that started them, and the kernel
        keeps a group until all threads of its processes have ended."""
        deadline = time.monotonic() + _REMOVE_SECONDS
        left = [self.group(node)] if node else _children(self.folder)
        while (left := [group for group in left if not _remove(group)]) and time.monotonic() < deadline:
            time.sleep(_JOIN_INTERVAL)
        _remove(self.folder)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep others from removing groups that have no process yet."""
        handle = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)

    def remove_stale(self) -> list[str]:
        """Remove the groups of clusters without processes, which were killed and never taken down. Returns their
        names. Must be called within ``locked``."""
        before = set(self.root.glob(f"{_PREFIX}????"))
        for folder in before:
            for group in _children(folder):
                _remove(group)
            _remove(folder)
        return sorted(each.name for each in before if not each.exists())


def find(tag: str, mounts: Path = _MOUNTS) -> CpuGroups | None:
    """The groups for a cluster with this tag. None if no hierarchy with the cpu controller is mounted."""
    unified = None
    for line in _text(mounts).splitlines():
        _, where, kind, options = line.split()[:4]
        if kind == "cgroup" and "cpu" in options.split(","):
            return CpuGroups(Path(where), 1, tag)
        if kind == "cgroup2" and "cpu" in _text(Path(where) / "cgroup.controllers").split():
            unified = CpuGroups(Path(where), 2, tag)
    return unified


def expect(tag: str, mounts: Path = _MOUNTS) -> CpuGroups:
    """The groups for a cluster with this tag. Raises ``EnvironmentFault`` if there are none."""
    found = find(tag, mounts)
    if found is None:
        raise EnvironmentFault(
            "cluster's CPU limits", "no control groups with the cpu controller are mounted", _HINT
        )
    return found


def _enable_cpu(folder: Path) -> None:
    control = folder / "cgroup.subtree_control"
    if "cpu" not in _text(control).split():
        control.write_text("+cpu")


def _members(group: Path) -> list[str]:
    return _text(group / "cgroup.procs").split()


def _children(folder: Path) -> list[Path]:
    with suppress(OSError):
        return [each for each in folder.iterdir() if each.is_dir()]
    return []


def _remove(group: Path) -> bool:
    """Whether the group is gone now."""
    with suppress(OSError):  # it is gone, or has processes or groups
        group.rmdir()
    return not group.exists()


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
