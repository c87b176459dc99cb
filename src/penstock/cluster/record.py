"""What is written down of a cluster, so that other commands, and topologies that are to run on it, find it: one
file in a folder of this user's alone. A machine has one cluster per user."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.cluster.network import Network
from penstock.cluster.processes import Process
from penstock.coordinator import runs
from penstock.errors import EnvironmentFault

_BOOT = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class Node:
    """One worker of Spark's."""

    name: str
    number: int
    """Where it is plugged in, from 1: of its address and its link. Free again when the node is gone."""
    host: str
    port: int
    process: Process | None = None
    draining: bool = False


@dataclass(frozen=True)
class Record:
    """A cluster, whole or half made. What is made of it is written down before, or found by ``tag`` or ``key``."""

    tag: str
    """In the names of its namespaces and links."""
    key: str
    """In the environment of its processes."""
    secret: str
    """Whoever knows it may run something on the cluster."""
    boot: str
    """Of the machine's start: after another one no process is left."""
    work: str
    """The folder its nodes work in."""
    slots: int
    """Of each node."""
    memory: str
    """Of each node's executor, as Java writes it."""
    host: str
    port: int
    web_port: int
    network: Network | None = None
    """None: all on loopback."""
    master: Process | None = None
    nodes: tuple[Node, ...] = ()
    named: int = 0
    """Nodes that have had a name so far: none is used twice."""
    ready: bool = False
    """``up`` has come to its end."""

    @property
    def url(self) -> str:
        return f"spark://{self.host}:{self.port}"

    def node(self, name: str) -> Node:
        for node in self.nodes:
            if node.name == name:
                return node
        raise EnvironmentFault(
            f"node '{name}'",
            "must be one of the cluster's",
            f"its nodes are {', '.join(node.name for node in self.nodes) or 'none'}",
            "See penstock cluster status.",
        )

    def with_node(self, node: Node) -> Record:
        """The node is new, or takes the place of the one of that name."""
        others = tuple(each for each in self.nodes if each.name != node.name)
        return dataclasses.replace(self, nodes=(*others, node))

    def without(self, name: str) -> Record:
        return dataclasses.replace(self, nodes=tuple(each for each in self.nodes if each.name != name))

    def validate(self) -> None:
        names, numbers = {node.name for node in self.nodes}, {node.number for node in self.nodes}
        assert len(names) == len(numbers) == len(self.nodes), "no two nodes have a name or a place in common"
        assert self.named >= len(self.nodes)

    # ---- on disk ---------------------------------------------------------------------------------------

    def save(self) -> None:
        self.validate()
        fresh = _file().with_suffix(".new")
        with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600), "w") as file:
            json.dump(dataclasses.asdict(self), file, indent=1)
        fresh.replace(_file())


def folder() -> Path:
    return runs.folder() / "cluster"


def load() -> Record | None:
    """The cluster there is, whole or not."""
    try:
        return _record(json.loads(_file().read_text()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise EnvironmentFault(
            f"{_file()}",
            "must be what penstock cluster up has written",
            f"{type(error).__name__}: {error}",
            "It may be of another version: end the cluster with that one.",
        ) from error


def find(master: str) -> Record | None:
    """The cluster, if ``master`` is its URL."""
    try:
        record = load()
    except EnvironmentFault:
        return None
    return record if record is not None and record.url == master else None


def boot() -> str:
    return _BOOT.read_text().strip()


@contextlib.contextmanager
def changing(make: bool = False) -> Iterator[None]:
    """Nobody else changes the cluster meanwhile. The folder is there, if ``make`` says so or it was before."""
    place = folder()
    while True:
        if make:
            place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            _check_owner(place.parent)
            place.mkdir(mode=0o700, exist_ok=True)
        try:
            handle = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            yield
            return
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            if place.exists() and os.path.samestat(os.fstat(handle), place.stat()):
                yield
                return
        finally:
            os.close(handle)  # else another one's ``down`` has removed the folder meanwhile: look again


def _check_owner(place: Path) -> None:
    seen = place.lstat()
    if seen.st_uid != os.getuid() or seen.st_mode & 0o077:
        raise EnvironmentFault(
            f"{place}",
            "must be this user's alone, for the cluster's secret is in it",
            f"owner {seen.st_uid}, mode {seen.st_mode & 0o777:o}",
            "Remove it, or set XDG_RUNTIME_DIR to a folder of yours.",
        )


def _file() -> Path:
    return folder() / "cluster.json"


def _record(found: dict[str, Any]) -> Record:
    def process(fields: dict[str, int] | None) -> Process | None:
        return Process(**fields) if fields else None

    nodes = tuple(Node(**{**node, "process": process(node["process"])}) for node in found["nodes"])
    network = Network(**found["network"]) if found["network"] else None
    return Record(**{**found, "master": process(found["master"]), "nodes": nodes, "network": network})
