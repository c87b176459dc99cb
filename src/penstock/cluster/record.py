"""What is written down of a cluster, so that other commands, and topologies that are to run on it, find it: one
file in a folder of this user's alone. A machine has one cluster per user.

The record names processes that ``down`` ends and a folder that it removes. So the folder of the record is checked
at every use (``penstock.private_folder``), and what is read must be such as ``up`` writes: names are derived from
the tag, and the work folder is only ever one that ``work_folder`` has named."""

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
from penstock.driver import runs
from penstock.errors import EnvironmentFault
from penstock.private_folder import PrivateFolder, if_present
from penstock.texts import parse_json

_FILE = "cluster.json"
_TAG = re.compile(r"[0-9a-f]{4}")
_NODE = re.compile(r"node-[0-9]{1,9}")
_BOOT = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class ClusterNode:
    """One worker of Spark's."""

    name: str
    number: int
    """Where it is plugged in, from 1: of its address and its link. Free again when the node is gone."""
    host: str
    port: int
    process: Process | None = None
    draining: bool = False


@dataclass(frozen=True)
class ClusterRecord:
    """A cluster, whole or half made. What is made of it is written down before, or found by ``tag`` or ``key``."""

    tag: str
    """In the names of its namespaces and links."""
    key: str
    """In the environment of its processes."""
    secret: str = field(repr=False)
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
    network: ClusterNetwork | None = None
    """None: all on loopback."""
    master: Process | None = None
    nodes: tuple[ClusterNode, ...] = ()
    named: int = 0
    """Nodes that have had a name so far: none is used twice."""
    ready: bool = False
    """``up`` has come to its end."""

    @property
    def url(self) -> str:
        return f"spark://{self.host}:{self.port}"

    def node(self, name: str) -> ClusterNode:
        for node in self.nodes:
            if node.name == name:
                return node
        raise EnvironmentFault(
            f"node '{name}'",
            f"the cluster has no such node, only {', '.join(node.name for node in self.nodes) or 'none'}",
            "See penstock cluster status.",
        )

    def with_node(self, node: ClusterNode) -> ClusterRecord:
        """The node is new, or takes the place of the one of that name."""
        others = tuple(each for each in self.nodes if each.name != node.name)
        return dataclasses.replace(self, nodes=(*others, node))

    def without(self, name: str) -> ClusterRecord:
        return dataclasses.replace(self, nodes=tuple(each for each in self.nodes if each.name != name))

    def validate(self) -> None:
        """Raises ``ValueError`` for what ``up`` does not write. Names end up in commands and paths."""
        if not _TAG.fullmatch(self.tag) or not (self.network is None or self.network.tag == self.tag):
            raise ValueError(f"tag {self.tag!r}")
        if not is_work_folder(Path(self.work), self.tag):
            raise ValueError(f"work folder {self.work!r}")
        if not all(_NODE.fullmatch(node.name) for node in self.nodes):
            raise ValueError("a node's name")
        if self.network is not None:
            IPv4Network(self.network.range)
        names, numbers = {node.name for node in self.nodes}, {node.number for node in self.nodes}
        assert len(names) == len(numbers) == len(self.nodes), "no two nodes have a name or a place in common"
        assert self.named >= len(self.nodes)

    # ---- on disk ---------------------------------------------------------------------------------------

    def save(self) -> None:
        """Within ``changing``."""
        self.validate()
        with opened() as place:
            place.write(_FILE, json.dumps(dataclasses.asdict(self), indent=1).encode())


def work_folder(tag: str) -> Path:
    """A new name for the folder that the nodes of a cluster work in; it is not made yet."""
    return Path(tempfile.gettempdir()).absolute() / f"penstock-cluster-{tag}-{secrets.token_hex(8)}"


def is_work_folder(path: Path, tag: str) -> bool:
    """Whether ``work_folder`` has named it. Only then it may be removed."""
    named = re.fullmatch(f"penstock-cluster-{re.escape(tag)}-[0-9a-f]{{16}}", path.name)
    return named is not None and path.is_absolute() and ".." not in path.parts


def folder() -> Path:
    return runs.folder() / "cluster"


def opened() -> PrivateFolder:
    """The cluster's folder, which exists. Raises ``FileNotFoundError``, ``EnvironmentFault`` where others could
    have written there."""
    with PrivateFolder.open(folder().parent) as above:
        return above.child(folder().name)


def load() -> ClusterRecord | None:
    """The cluster there is, whole or not. Raises ``EnvironmentFault`` where it cannot be trusted."""
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
            f"it is not what penstock cluster up writes ({type(error).__name__}: {error})",
            "It may come from another version: end the cluster with that version.",
        ) from error


def find(master: str) -> ClusterRecord | None:
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
        # Another one's ``down`` has removed the folder meanwhile: look again.


def remove() -> None:
    """The cluster's folder, and with it the record. Within ``changing``."""
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
