"""The record of a cluster, with which other commands and topologies find it: one file in a folder that only this
user can write. A user has one cluster per machine.

The record names processes that ``down`` stops and a folder that it removes. Therefore the record's folder is
checked at every use (``penstock.private_folder``), and its content must be what ``up`` writes: names are derived
from the tag, and the work folder must have a name given by ``work_folder``."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import re
import secrets
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from ipaddress import IPv4Network
from pathlib import Path
from typing import Any

from penstock.cluster.network import ClusterNetwork
from penstock.cluster.processes import Process
from penstock.driver import discovery
from penstock.errors import EnvironmentFault
from penstock.private_folder import PrivateFolder, if_present
from penstock.texts import parse_json

_FILE = "cluster.json"
_TAG = re.compile(r"[0-9a-f]{4}")
_NODE = re.compile(r"node-[0-9]{1,9}")
_BOOT = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class ClusterNode:
    """A node of the cluster: one Spark worker."""

    name: str
    number: int
    """Determines the node's address and link, from 1. The number is reused when the node is gone."""
    host: str
    port: int
    process: Process | None = None
    draining: bool = False
    cpus: float | None = None
    """Cores that its processes may use together. None: as many as the machine has."""


@dataclass(frozen=True)
class ClusterRecord:
    """A cluster, complete or not. Everything created for it is recorded before, or can be found by ``tag`` or
    ``key``."""

    tag: str
    """Part of the names of its namespaces and links."""
    key: str
    """Part of the mark in the environment of its processes."""
    secret: str = field(repr=False)
    """Whoever knows it can run programs on the cluster."""
    boot: str
    """The machine's boot id. After a reboot no process of the cluster is left."""
    work: str
    """The folder that contains the nodes' working directories and logs."""
    slots: int
    """Task slots of each node."""
    memory: str
    """Heap of each node's executor, in Java's notation."""
    host: str
    port: int
    web_port: int
    network: ClusterNetwork | None = None
    """None: all nodes are on loopback."""
    master: Process | None = None
    nodes: tuple[ClusterNode, ...] = ()
    named: int = 0
    """Number of node names given so far. A name is never used twice."""
    ready: bool = False
    """Whether ``up`` has completed."""
    cpus: float | None = None
    """Cores of each node that is added without a number of its own."""

    @property
    def url(self) -> str:
        return f"spark://{self.host}:{self.port}"

    def node(self, name: str) -> ClusterNode:
        for node in self.nodes:
            if node.name == name:
                return node
        raise EnvironmentFault(
            f"node '{name}'",
            f"the cluster has no such node; it has {', '.join(node.name for node in self.nodes) or 'none'}",
            "See penstock cluster status.",
        )

    def with_node(self, node: ClusterNode) -> ClusterRecord:
        """The record with this node added, or put in the place of the node with the same name."""
        others = tuple(each for each in self.nodes if each.name != node.name)
        return dataclasses.replace(self, nodes=(*others, node))

    def without(self, name: str) -> ClusterRecord:
        return dataclasses.replace(self, nodes=tuple(each for each in self.nodes if each.name != name))

    def validate(self) -> None:
        """Raises ``ValueError`` for values that ``up`` does not write. Names become part of commands and paths."""
        if not _TAG.fullmatch(self.tag) or not (self.network is None or self.network.tag == self.tag):
            raise ValueError(f"tag {self.tag!r}")
        if not is_work_folder(Path(self.work), self.tag):
            raise ValueError(f"work folder {self.work!r}")
        if not all(_NODE.fullmatch(node.name) for node in self.nodes):
            raise ValueError("a node's name")
        if self.network is not None:
            IPv4Network(self.network.range)
        names, numbers = {node.name for node in self.nodes}, {node.number for node in self.nodes}
        assert len(names) == len(numbers) == len(self.nodes), "two nodes have the same name or number"
        assert self.named >= len(self.nodes)

    # ---- on disk ---------------------------------------------------------------------------------------

    def save(self) -> None:
        """Write the record. Must be called within ``changing``."""
        self.validate()
        with opened() as place:
            place.write(_FILE, json.dumps(dataclasses.asdict(self), indent=1).encode())


def work_folder(tag: str) -> Path:
    """A new name for a cluster's work folder. The folder is not created."""
    return Path(tempfile.gettempdir()).absolute() / f"penstock-cluster-{tag}-{secrets.token_hex(8)}"


def is_work_folder(path: Path, tag: str) -> bool:
    """Whether ``work_folder`` gave this name. Only then may the folder be removed."""
    named = re.fullmatch(f"penstock-cluster-{re.escape(tag)}-[0-9a-f]{{16}}", path.name)
    return named is not None and path.is_absolute() and ".." not in path.parts


def folder() -> Path:
    return discovery.folder() / "cluster"


def opened() -> PrivateFolder:
    """Open the cluster's folder. Raises ``FileNotFoundError`` if it does not exist, and ``EnvironmentFault`` if
    other users could have written there."""
    with PrivateFolder.open(folder().parent) as above:
        return above.child(folder().name)


def load() -> ClusterRecord | None:
    """The recorded cluster, complete or not. Raises ``EnvironmentFault`` if the record cannot be trusted."""
    try:
        with opened() as place:
            made = _record(parse_json(place.read(_FILE)))
            made.validate()
            return made
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError, AttributeError, AssertionError, RecursionError) as error:
        raise EnvironmentFault(
            f"{folder() / _FILE}",
            f"it is not a record that penstock cluster up writes ({type(error).__name__}: {error})",
            "It may come from another version: stop the cluster with that version.",
        ) from error


def find(master: str) -> ClusterRecord | None:
    """The recorded cluster if ``master`` is its URL."""
    try:
        record = load()
    except EnvironmentFault:
        return None
    return record if record is not None and record.url == master else None


def boot() -> str:
    return _BOOT.read_text().strip()


@contextlib.contextmanager
def changing(make: bool = False) -> Iterator[None]:
    """Hold the lock for changing the cluster. If ``make`` is true, the folder is created if needed."""
    while True:
        try:
            with PrivateFolder.open(folder().parent, make) as above:
                place = above.child(folder().name, make)
        except FileNotFoundError:
            yield
            return
        with place:
            fcntl.flock(place.descriptor, fcntl.LOCK_EX)
            if _is_current(place):
                yield
                return
        # Another process's ``down`` has removed the folder in the meantime: try again.


def remove() -> None:
    """Remove the cluster's folder with the record. Must be called within ``changing``."""
    with if_present(folder().parent) as above:
        if above is not None:
            above.remove_tree(folder().name)


def _is_current(place: PrivateFolder) -> bool:
    try:
        return os.path.samestat(os.fstat(place.descriptor), place.path.lstat())
    except FileNotFoundError:
        return False


def _record(found: dict[str, Any]) -> ClusterRecord:
    def process(fields: dict[str, int] | None) -> Process | None:
        return Process(**fields) if fields else None

    nodes = tuple(ClusterNode(**{**node, "process": process(node["process"])}) for node in found["nodes"])
    network = ClusterNetwork(**found["network"]) if found["network"] else None
    return ClusterRecord(**{**found, "master": process(found["master"]), "nodes": nodes, "network": network})
