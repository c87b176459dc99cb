"""``penstock cluster up``, ``add``, ``drain``, ``status``, ``down``: manage a Spark cluster on this machine."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.table import Table
from rich.text import Text

from penstock.cli.terminal import Terminal
from penstock.cli.view import number
from penstock.cluster import manage
from penstock.cluster.manage import ClusterPlan, NodeStatus, Progress
from penstock.cluster.record import ClusterRecord
from penstock.driver import discovery
from penstock.driver.discovery import DriverEntry
from penstock.errors import ControlRefused, EnvironmentFault, PenstockError
from penstock.protocol.requests import OperatorRequest
from penstock.redaction import printable
from penstock.spark.java import ensure_java
from penstock.texts import parse_json

_DRAIN_SECONDS = 60.0  # default time limit: replacing one topology takes about 10 s, and there may be several
_POLL_INTERVAL = 1.0  # seconds between two checks which topologies have workers on a node
_FORCE_WARNING = (
    "Topologies that still have workers on the node lose them and restart on the other nodes from the last "
    "committed epoch. With at_most_once delivery, tuples in flight are lost."
)


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "cluster",
        help="manage a Spark cluster on this machine",
        description="Starts Spark's master and workers on this machine. Each node runs in its own network "
        "namespace, behind a link of limited rate. This needs root; without root the nodes share the loopback "
        "interface.",
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    _add_up(actions)
    add = actions.add_parser(
        "add",
        help="start more nodes",
        description="Starts more nodes. A running topology uses them after its next replace or scale.",
    )
    add.add_argument("--nodes", type=int, default=1, metavar="N", help="number of nodes (default: %(default)s)")
    _add_cpus(add, "as for penstock cluster up")
    add.set_defaults(handler=handle_add)
    drain = actions.add_parser(
        "drain",
        help="move all topologies off a node and remove it",
        description="The node accepts no new workers. Every topology with workers on it is replaced on the other "
        "nodes, as penstock scale does, without loss. Then the node is removed.",
    )
    drain.add_argument("node", metavar="NODE", help="the node's name (see penstock cluster status)")
    drain.add_argument(
        "--seconds",
        type=float,
        default=_DRAIN_SECONDS,
        metavar="N",
        help="time limit for the node to become empty, in seconds (default: %(default)g)",
    )
    drain.add_argument(
        "--force",
        action="store_true",
        help=f"remove the node after the time limit even if it is not empty. {_FORCE_WARNING}",
    )
    drain.set_defaults(handler=handle_drain)
    status = actions.add_parser("status", help="show the nodes and what runs on them")
    status.add_argument("--json", action="store_true", help="print JSON")
    status.set_defaults(handler=handle_status)
    down = actions.add_parser(
        "down",
        help="stop the cluster and remove everything it created",
        description="Stops all processes of the cluster and removes its namespaces, links and folders. Also "
        "cleans up after a cluster whose start failed. Topologies that run on the cluster lose their workers.",
    )
    down.set_defaults(handler=handle_down)


def _add_cpus(parser: argparse.ArgumentParser, default: str) -> None:
    parser.add_argument(
        "--cpus",
        type=float,
        metavar="X",
        help="limit all processes of each node to this many cores together, such as 0.5, by a control group. "
        f"Needs root (default: {default})",
    )


def _add_up(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    up = actions.add_parser("up", help="start a cluster")
    up.add_argument(
        "--nodes", type=int, default=ClusterPlan.nodes, metavar="N", help="number of nodes (default: %(default)s)"
    )
    up.add_argument(
        "--link",
        default=ClusterPlan.link,
        metavar="RATE",
        help="rate of each node's link in each direction: 100mbit, 1gbit or none (default: %(default)s)",
    )
    up.add_argument(
        "--slots",
        type=int,
        default=ClusterPlan.slots,
        metavar="N",
        help="task slots of each node; a slot is a thread that mostly waits, not a core (default: %(default)s)",
    )
    up.add_argument(
        "--memory",
        default=ClusterPlan.memory,
        metavar="SIZE",
        help="heap of each node's JVM, such as 2g (default: %(default)s)",
    )
    _add_cpus(up, "no limit; the nodes share the cores of the machine")
    up.add_argument(
        "--plain",
        action="store_true",
        help="create no namespaces and links; the nodes share the loopback interface",
    )
    up.set_defaults(handler=handle_up)


def handle_up(options: argparse.Namespace) -> int:
    plain = options.plain
    if not plain and os.geteuid() != 0:
        plain = True
        print("penstock: without root the nodes share the loopback interface; --link has no effect")
    plan = ClusterPlan(options.nodes, options.link, options.slots, options.memory, plain, options.cpus)
    with _progress() as progress:
        cluster = manage.up(plan, ensure_java(), progress)
    link = "on loopback" if plain else f"link {options.link}"
    link += "" if options.cpus is None else f", {options.cpus:g} cores"
    print(f"{len(cluster.nodes)} nodes with {cluster.slots} slots each, {link}, master {cluster.url}")
    print(f"Run a topology with: penstock run FILE --master {cluster.url}")
    return 0


def handle_add(options: argparse.Namespace) -> int:
    with _progress() as progress:
        nodes = manage.add(options.nodes, ensure_java(), progress, options.cpus)
    joined = ", ".join(node.name for node in nodes)
    print(f"added {joined}; a running topology uses new nodes after its next replace or scale")
    return 0


def handle_drain(options: argparse.Namespace) -> int:
    name = options.node
    with _progress() as progress:
        manage.decommission(name)
        empty = _move_topologies_off(name, options.seconds, progress)
        if not empty and not options.force:
            raise EnvironmentFault(
                f"node '{name}'",
                f"it was not empty within {options.seconds:g} s: "
                + (
                    ", ".join(f"'{run.topology}' has {workers} workers there" for run, workers in _on_node(name))
                    or f"{len(manage.executors(name))} processes run there"
                ),
                f"The node accepts no new workers. Run the command again, or add --force. {_FORCE_WARNING}",
            )
        progress(f"removing {name} …")
        manage.remove(name)
    restarted = "" if empty else "; topologies that ran there restart on the other nodes"
    print(f"removed {name}{restarted}")
    return 0


def _move_topologies_off(node: str, seconds: float, progress: Progress) -> bool:
    """Ask every topology with workers on the node, including those that start meanwhile, once to leave it. Returns
    whether the node became empty in time."""
    asked: set[DriverEntry] = set()
    deadline = time.monotonic() + seconds
    while not manage.await_empty(node, min(_POLL_INTERVAL, max(0.0, deadline - time.monotonic())), progress):
        for run, workers in _on_node(node):
            if run in asked:
                continue
            asked.add(run)
            progress(f"'{run.topology}' leaves {node} …")
            try:
                run.ask(OperatorRequest("scale", {"parallelism": {}, "reason": f"{node} is drained"}), None)
                print(f"moved {workers} workers of '{run.topology}' off {node}")
            except PenstockError as error:
                print(f"'{run.topology}' keeps {workers} workers on {node}: {error}", file=sys.stderr)
        if time.monotonic() > deadline:
            return False
    return True


def handle_status(options: argparse.Namespace) -> int:
    cluster, nodes = manage.statuses()
    workers = {status.node.name: _topologies(status.node.name) for status in nodes}
    if options.json:
        print(json.dumps(_as_json(cluster, nodes, workers)))
        return 0
    table = Table(box=None, pad_edge=False)
    for column in ("node", "address", "state", "executors", "cores", "waited", "sent", "received", "topologies"):
        right = column in ("executors", "cores", "waited", "sent", "received")
        table.add_column(column, justify="right" if right else "left")
    for status in nodes:
        node = status.node
        there = ", ".join(f"{topology} ({count} workers)" for topology, count in workers[node.name].items())
        passed = ["" if count is None else number(count) for count in (status.sent, status.received)]
        cores = "" if node.cpus is None else f"{node.cpus:g}"
        waited = "" if status.throttled is None else f"{status.throttled:.1f} s"
        table.add_row(node.name, node.host, status.state, str(status.executors), cores, waited, *passed, there)
    rate = cluster.network.rate if cluster.network is not None else None
    print(
        f"master {cluster.url}, {cluster.slots} slots per node",
        f", links {rate / 1e6:g} Mbit/s" if rate else "",
        sep="",
    )
    if not cluster.ready:
        print("The start of this cluster did not complete. Remove it with penstock cluster down.")
    Terminal().print(table)
    print(f"logs: {cluster.work}, Spark's web page: http://{cluster.host}:{cluster.web_port}")
    return 0


def handle_down(options: argparse.Namespace) -> int:
    with _progress() as progress:
        existed = manage.down(progress)
    print("the cluster is stopped and removed" if existed else "there is no cluster")
    return 0


def _as_json(
    cluster: ClusterRecord, nodes: list[NodeStatus], workers: dict[str, dict[str, int]]
) -> dict[str, object]:
    """The cluster as JSON values, without its secret."""
    return {
        "master": cluster.url,
        "ready": cluster.ready,
        "slots": cluster.slots,
        "rate": cluster.network.rate if cluster.network is not None else None,
        "nodes": [
            {
                "name": status.node.name,
                "address": status.node.host,
                "state": status.state,
                "pid": status.node.process.pid if status.node.process else None,
                "executors": status.executors,
                "cpus": status.node.cpus,
                "throttled": status.throttled,
                "sent": status.sent,
                "received": status.received,
                "topologies": workers[status.node.name],
            }
            for status in nodes
        ],
    }


def _topologies(node: str) -> dict[str, int]:
    return {run.topology: workers for run, workers in _on_node(node)}


def _on_node(node: str) -> list[tuple[DriverEntry, int]]:
    """The topologies that have workers on the node, each with their number."""
    found = []
    for run in discovery.running():
        try:
            workers = parse_json(run.ask(OperatorRequest("status")))["workers"]
        except ControlRefused:
            continue  # it has just ended
        there = sum(1 for each in workers if each["pid"] is not None and manage.node_of(each["pid"]) == node)
        if there:
            found.append((run, there))
    return found


@contextmanager
def _progress() -> Iterator[Progress]:
    """A spinner with a changing line on a terminal; no output elsewhere."""
    with Terminal(file=sys.stderr).status("reading the cluster's state …") as spinner:
        yield lambda line: spinner.update(Text(printable(line)))  # Text, because a name may look like markup
