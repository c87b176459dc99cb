"""Starts the cluster, adds and removes nodes, and stops the cluster. Each step is recorded before the next one
begins, so that ``down`` finds everything even if a process dies in between."""

from __future__ import annotations

import dataclasses
import secrets
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random

from penstock.cluster import cpu_groups, processes, record, standalone
from penstock.cluster.network import ClusterNetwork, Rate, usable
from penstock.cluster.record import ClusterNode, ClusterRecord
from penstock.errors import EnvironmentFault, SettingError
from penstock.private_folder import PrivateFolder, remove_private_tree

_START_SECONDS = 120.0  # time limit for nodes to join: 4 nodes need 6 s, on two busy cores up to 30 s
_END_SECONDS = 10.0  # executors end within 2 s of their worker; after this time they are killed
_POLL_INTERVAL = 0.1  # seconds between two checks of a node that starts or is being drained
_LEAST_CPUS, _MOST_CPUS = 0.05, 1024.0  # cores of a node: with less than the least a JVM takes minutes to start
_MASTER_PORT = 7077  # Spark's default port
_MASTER = "master"
_SETTINGS = "spark.conf"
Progress = Callable[[str], None]


@dataclass(frozen=True)
class ClusterPlan:
    """The cluster that ``up`` creates."""

    nodes: int = 4
    link: str = "1gbit"
    slots: int = 16
    memory: str = "1g"
    plain: bool = False
    """True: no namespaces and links, all nodes on loopback."""
    cpus: float | None = None
    """Cores that the processes of each node may use together. None: as many as the machine has."""

    def __post_init__(self) -> None:
        Rate.parse(self.link)
        check_cpus(self.cpus)
        for name, value, most in (("--nodes", self.nodes, 200), ("--slots", self.slots, 1024)):
            if not 1 <= value <= most:
                raise SettingError(name, f"{value} is not between 1 and {most}")
        if not (self.memory[:-1].isdecimal() and self.memory[-1:] in "mg"):
            raise SettingError(
                "--memory", f"{self.memory!r} is not a number followed by m or g, as Java expects it", "Try 1g."
            )


@dataclass(frozen=True)
class NodeStatus:
    """The current state of a node."""

    node: ClusterNode
    state: str
    """``up``, ``starting``, ``draining``, ``empty`` (drained, no executor left) or ``dead``."""
    executors: int
    """Spark executors on the node: one per application."""
    sent: int | None
    received: int | None
    """Bytes sent and received over the node's link so far; None if the node has no link."""
    throttled: float | None = None
    """Seconds for which its processes have waited because of its CPU limit; None if it has no limit."""


def up(plan: ClusterPlan, java_home: str, progress: Progress = lambda line: None) -> ClusterRecord:
    """Start a master and its workers, and return when all have joined. If a step fails, everything created so far
    is removed. Raises ``EnvironmentFault``."""
    with record.changing(make=True):
        found = record.load()
        if found is not None:
            raise EnvironmentFault(
                "cluster",
                f"this user already has a cluster on this machine, with {len(found.nodes)} nodes at {found.url}"
                + ("" if found.ready else ", whose start did not complete"),
                "Use it (penstock cluster status), or stop it first with penstock cluster down.",
            )
        try:
            return _up(plan, java_home, progress)
        except BaseException:
            progress("removing what was created so far …")
            _down()
            raise


def check_cpus(cpus: float | None) -> None:
    """Raises ``SettingError`` if this is not a number of cores for a node."""
    if cpus is not None and not _LEAST_CPUS <= cpus <= _MOST_CPUS:
        raise SettingError("--cpus", f"{cpus:g} is not between {_LEAST_CPUS:g} and {_MOST_CPUS:g} cores")


def add(
    count: int, java_home: str, progress: Progress = lambda line: None, cpus: float | None = None
) -> list[ClusterNode]:
    """Start more nodes, and return when they have joined. ``cpus``: cores of each; None: as with ``up``."""
    if count < 1:
        raise SettingError("--nodes", f"{count} is less than 1")
    check_cpus(cpus)
    with _existing() as found:
        before = {node.name for node in found.nodes}
        try:
            after = _start_nodes(found, count, java_home, progress, cpus or found.cpus)
        except BaseException:
            for node in _expect().nodes:
                if node.name not in before:
                    _remove_node(node.name)
            raise
        return [node for node in after.nodes if node.name not in before]


def decommission(name: str) -> ClusterNode:
    """Let a node accept no new executors and no new tasks. What runs there continues; an executor without tasks
    ends by itself. This cannot be undone."""
    with _existing() as found:
        node = dataclasses.replace(found.node(name), draining=True)
        others = [each for each in found.nodes if each.name != name and not each.draining]
        if not others:
            raise EnvironmentFault(
                f"node '{name}'",
                "it is the cluster's only node, so it cannot be removed",
                "Add another node first (penstock cluster add), or stop the cluster with penstock cluster down.",
            )
        found.with_node(node).save()
        if node.process is not None:
            processes.send(node.process, signal.SIGPWR)
        return node


def executors(name: str) -> list[processes.Process]:
    """The live processes that a node's Spark worker has started: Spark executors and their Python processes."""
    found = _expect()
    worker = found.node(name).process
    return [each for each in processes.marked(found.key, name) if each != worker]


def await_empty(name: str, timeout: float, progress: Progress = lambda line: None) -> bool:
    """Wait until no application has processes on the node. Returns False if one still has after the time limit."""
    deadline = time.monotonic() + timeout
    while left := executors(name):
        if time.monotonic() > deadline:
            return False
        progress(f"{name} still has {len(left)} processes …")
        time.sleep(_POLL_INTERVAL)
    return True


def remove(name: str) -> None:
    """Stop a node, whatever runs on it, and remove its namespace, link and folder."""
    with _existing() as found:
        found.node(name)
        _remove_node(name)


def down(progress: Progress = lambda line: None) -> bool:
    """Remove everything that belongs to the cluster, complete or not. Returns False if there was no cluster."""
    with record.changing():
        if not record.folder().exists():
            return False
        _down(progress)
        return True


def statuses() -> tuple[ClusterRecord, list[NodeStatus]]:
    """The cluster and the state of its nodes. Raises ``EnvironmentFault`` if there is no cluster."""
    found = _expect()
    states = standalone.workers(found)
    return found, [_status(found, node, states) for node in found.nodes]


def node_of(pid: int) -> str | None:
    """The cluster's node that a process of this machine runs on, if any."""
    found = record.load()
    return processes.node_of(pid, found.key) if found is not None else None


# ---- steps ---------------------------------------------------------------------------------------------


def _up(plan: ClusterPlan, java_home: str, progress: Progress) -> ClusterRecord:
    tag, host, network = secrets.token_hex(2), "127.0.0.1", None
    if plan.cpus is not None:
        _check_groups(tag, plan.cpus)
    if not plan.plain:
        problem = usable()
        if problem:
            raise EnvironmentFault(
                "cluster's network",
                f"it needs root and the commands ip, tc and unshare ({problem})",
                "Install iproute2 and util-linux and run as root, or use --plain to run all nodes on loopback "
                "without links.",
            )
        network = ClusterNetwork.choose(tag, Rate.parse(plan.link), Random(secrets.randbits(64)))
        host = network.host_address
    work = record.work_folder(tag)
    found = ClusterRecord(
        tag, secrets.token_hex(8), secrets.token_hex(32), record.boot(), str(work), plan.slots, plan.memory,
        host, 0, 0, network, cpus=plan.cpus,
    )  # fmt: skip
    found.save()
    work.mkdir(mode=0o700)  # raises if it exists: nobody else may have created the folder with this random name
    if network is not None:
        progress(f"creating a network in {network.range} …")
        network.make_switch()
    found = dataclasses.replace(found, port=_free_port(host, _MASTER_PORT), web_port=_free_port(host))
    found.save()
    with record.opened() as place:
        place.write(_SETTINGS, standalone.settings_text(found.secret).encode())
    settings = _settings_file()
    progress("starting the master …")
    (work / _MASTER).mkdir()
    found = dataclasses.replace(
        found,
        master=processes.launch(
            standalone.master_command(found, java_home, settings),
            standalone.environment(java_home, host, work / _MASTER),
            found.key,
            _MASTER,
            _log(found, _MASTER),
        ),
    )
    found.save()
    found = _start_nodes(found, plan.nodes, java_home, progress, plan.cpus)
    found = dataclasses.replace(found, ready=True)
    found.save()
    return found


def _check_groups(tag: str, cpus: float) -> None:
    """Check that CPU limits are possible before anything is started, and remove what killed clusters left. Raises
    ``EnvironmentFault``."""
    groups = cpu_groups.expect(tag)
    with groups.locked():
        groups.remove_stale()
        groups.make("probe", cpus)
        groups.remove()


def _start_nodes(
    found: ClusterRecord, count: int, java_home: str, progress: Progress, cpus: float | None
) -> ClusterRecord:
    """Start this many more nodes, and wait until all have joined the master."""
    names = []
    for _ in range(count):
        node = dataclasses.replace(_next_node(found), cpus=cpus)
        names.append(node.name)
        progress(f"starting {node.name} …")
        found = dataclasses.replace(found.with_node(node), named=found.named + 1)
        found.save()
        work = Path(found.work) / node.name
        work.mkdir(mode=0o700)
        command = standalone.worker_command(found, node, java_home, _settings_file(), work)
        if found.network is not None:
            found.network.make_node(node.name, node.number)
            command = found.network.inside(node.name, command)
        process = _launch(found, node, command, standalone.environment(java_home, node.host, work, cpus))
        found = found.with_node(dataclasses.replace(node, process=process))
        found.save()
    _await_workers(found, names, progress)
    return found


def _launch(
    found: ClusterRecord, node: ClusterNode, command: list[str], environment: dict[str, str]
) -> processes.Process:
    """Start a node's Spark worker, in a group of its own if its CPU is limited."""
    log = _log(found, node.name)
    if node.cpus is None:
        return processes.launch(command, environment, found.key, node.name, log)
    groups = cpu_groups.expect(found.tag)
    with groups.locked():
        groups.make(node.name, node.cpus)
        process = processes.launch(groups.inside(node.name, command), environment, found.key, node.name, log)
        if not groups.await_joined(node.name):
            processes.end([process], _END_SECONDS)
            raise _failed(found, node.name, "could not be limited to its CPUs")
    return process


def _next_node(found: ClusterRecord) -> ClusterNode:
    number = next(n for n in range(1, len(found.nodes) + 2) if n not in {node.number for node in found.nodes})
    name = f"node-{found.named + 1}"
    if found.network is None:
        return ClusterNode(name, number, "127.0.0.1", _free_port("127.0.0.1"))
    if number > found.network.most:
        raise EnvironmentFault(
            "cluster's network", f"it has addresses for {found.network.most} nodes only, too few for {name}"
        )
    return ClusterNode(name, number, found.network.address(number), _MASTER_PORT + 1)


def _await_workers(found: ClusterRecord, names: list[str], progress: Progress) -> None:
    deadline = time.monotonic() + _START_SECONDS
    waited_for = [found.node(name) for name in names]
    while True:
        states = standalone.workers(found)
        missing = [node for node in waited_for if states.get((node.host, node.port)) != "ALIVE"]
        if not missing:
            return
        progress(f"{len(names) - len(missing)} of {len(names)} nodes have joined {found.url} …")
        for who, process in [(_MASTER, found.master), *((node.name, node.process) for node in missing)]:
            if process is not None:
                processes.reap([process])
            if process is None or not process.alive:
                raise _failed(found, who, "ended right after its start")
        if time.monotonic() > deadline:
            raise _failed(found, missing[0].name, f"did not join within {_START_SECONDS:.0f} s")
        time.sleep(_POLL_INTERVAL)


def _failed(found: ClusterRecord, who: str, what: str) -> EnvironmentFault:
    log = _log(found, who)
    output = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
    errors = [line for line in output if " ERROR " in line or "Exception" in line or line.startswith("Error")]
    return EnvironmentFault(
        f"cluster's {who}",
        f"it {what}: {(errors or output or ['it printed nothing'])[-1].strip()}",
        "The machine may be short of memory: try fewer nodes or a smaller --memory.",
    )


def _remove_node(name: str) -> None:
    found = _expect()
    node = found.node(name)
    processes.end(_processes_of(found, name), _END_SECONDS)
    if found.network is not None:
        found.network.remove_node(name, node.number)
    _remove_groups(found, name)
    with suppress(FileNotFoundError), PrivateFolder.open(Path(found.work)) as work:
        work.remove_tree(name)
        work.remove(_log(found, name).name)
    found.without(name).save()


def _processes_of(found: ClusterRecord, node: str | None = None) -> list[processes.Process]:
    """The processes of one node, or of the whole cluster: those in the record and those that carry its mark."""
    written = {each.process for each in found.nodes if node in (None, each.name)}
    written |= {found.master} if node is None else set()
    here = found.boot == record.boot()
    return list({each for each in written if each is not None and here} | set(processes.marked(found.key, node)))


def _down(progress: Progress = lambda line: None) -> None:
    found = record.load()
    if found is not None:
        progress("stopping its processes …")
        while alive := _processes_of(found):  # repeated, because one may have been starting in the first pass
            left = processes.end(alive, _END_SECONDS)
            if left:
                raise EnvironmentFault(
                    "cluster",
                    f"process {left[0].pid} did not end although it was killed",
                    "It waits in the kernel, for example for a disk. Run the command again.",
                )
            if not any(each.alive for each in _processes_of(found)):
                break
        if found.network is not None:
            progress("removing its network …")
            found.network.remove()
        _remove_groups(found)
        remove_private_tree(Path(found.work))
    record.remove()


def _remove_groups(found: ClusterRecord, node: str | None = None) -> None:
    groups = cpu_groups.find(found.tag)
    if groups is not None:
        groups.remove(node)


def _status(found: ClusterRecord, node: ClusterNode, states: dict[tuple[str, int], str]) -> NodeStatus:
    here = processes.marked(found.key, node.name)
    sent = received = None
    if found.network is not None:
        with suppress(EnvironmentFault):  # the link may not exist yet
            sent, received = found.network.passed(node.number)
    children = sum(1 for each in here if each != node.process and _is_executor(each.pid))
    alive = node.process is not None and node.process.alive
    if not alive:
        state = "dead"
    elif node.draining:
        state = "draining" if children else "empty"
    else:
        state = "up" if states.get((node.host, node.port)) == "ALIVE" else "starting"
    groups = cpu_groups.find(found.tag) if node.cpus is not None else None
    throttled = groups.throttled(node.name) if groups is not None else None
    return NodeStatus(node, state, children, sent, received, throttled)


def _is_executor(pid: int) -> bool:
    try:
        return b"CoarseGrainedExecutorBackend" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


@contextmanager
def _existing() -> Iterator[ClusterRecord]:
    with record.changing():
        found = _expect()
        if not found.ready or found.boot != record.boot():
            raise EnvironmentFault(
                "cluster",
                "it is not up: penstock cluster up did not complete, or the machine was restarted since",
                "Run penstock cluster down, then penstock cluster up.",
            )
        yield found


def _expect() -> ClusterRecord:
    found = record.load()
    if found is None:
        raise EnvironmentFault("cluster", "this user has no cluster on this machine", "Run penstock cluster up.")
    return found


def _settings_file() -> Path:
    return record.folder() / _SETTINGS


def _log(found: ClusterRecord, who: str) -> Path:
    return Path(found.work) / f"{who}.log"


def _free_port(host: str, wanted: int = 0) -> int:
    """The wanted port if it is free, otherwise any free port."""
    for port in (wanted, 0):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    raise EnvironmentFault(f"address {host}", "it has no free port", "Stop a program that listens there.")
