"""``penstock cluster up``, ``add``, ``drain``, ``status``, ``down``: a Spark cluster on this machine."""

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
from penstock.driver import runs
from penstock.driver.runs import Run
from penstock.errors import ControlRefused, EnvironmentFault, PenstockError
from penstock.protocol.requests import OperatorRequest
from penstock.redaction import printable
from penstock.spark.java import ensure_java
from penstock.texts import parse_json

_DRAIN_SECONDS = 60.0
_LOOK = 1.0  # seconds between two looks at who has slots on a node
_LEFT = (
    "Topologies that still have slots there lose them and start again on the other nodes by themselves, from the "
    "last committed epoch; at most once, tuples in flight are lost."
)


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "cluster",
        help="a Spark cluster on this machine, each node behind a link of its own",
        description="Starts Spark's master and workers on this machine, each worker in a network namespace of its "
        "own behind a link of limited rate. That needs root; without it the workers share loopback.",
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    _add_up(actions)
    add = actions.add_parser("add", help="start more nodes", description="Starts more nodes; a topology uses them "
        "once it is replaced or scaled.")  # fmt: skip
    add.add_argument("--nodes", type=int, default=1, metavar="N", help="how many (default: %(default)s)")
    add.set_defaults(handler=handle_add)
    drain = actions.add_parser(
        "drain",
        help="empty a node and remove it",
        description="The node takes nothing new. Topologies with slots on it are replaced by themselves on the "
        "other nodes, as penstock scale does it: nothing is lost. Then the node is removed.",
    )
    drain.add_argument("node", metavar="NODE", help="its name (see penstock cluster status)")
    drain.add_argument(
        "--seconds",
        type=float,
        default=_DRAIN_SECONDS,
        metavar="N",
        help="how long it may take to be empty (default: %(default)g)",
    )
    drain.add_argument("--force", action="store_true", help=f"remove it even if it is not empty then. {_LEFT}")
    drain.set_defaults(handler=handle_drain)
    status = actions.add_parser("status", help="its nodes, and what runs on them")
    status.add_argument("--json", action="store_true", help="as JSON")
    status.set_defaults(handler=handle_status)
    down = actions.add_parser(
        "down",
        help="end the cluster and remove every trace",
        description="Ends all its processes and removes its namespaces, links and folders, also of a cluster that "
        "is not completely up. Topologies that run on it lose their slots.",
    )
    down.set_defaults(handler=handle_down)


def _add_up(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    up = actions.add_parser("up", help="start a cluster")
    up.add_argument(
        "--nodes", type=int, default=ClusterPlan.nodes, metavar="N", help="how many (default: %(default)s)"
    )
    up.add_argument(
        "--link",
        default=ClusterPlan.link,
        metavar="RATE",
        help="of each node's link, each way: 100mbit, 1gbit, none (default: %(default)s)",
    )
    up.add_argument(
        "--slots",
        type=int,
        default=ClusterPlan.slots,
        metavar="N",
        help="task slots of each node: threads that mostly wait, not cores (default: %(default)s)",
    )
    up.add_argument(
        "--memory",
        default=ClusterPlan.memory,
        metavar="SIZE",
        help="of each node's JVM, say 2g (default: %(default)s)",
    )
    up.add_argument("--plain", action="store_true", help="no namespaces and links: the nodes share loopback")
    up.set_defaults(handler=handle_up)


def handle_up(options: argparse.Namespace) -> int:
    plain = options.plain
    if not plain and os.geteuid() != 0:
        plain = True
        print("penstock: not root, so the nodes share loopback: no links of their own, --link does nothing")
    plan = ClusterPlan(options.nodes, options.link, options.slots, options.memory, plain)
    with _progress() as progress:
        cluster = manage.up(plan, ensure_java(), progress)
    link = "on loopback" if plain else f"link {options.link}"
    print(f"{len(cluster.nodes)} nodes of {cluster.slots} slots, {link}, master {cluster.url}")
    print(f"penstock run FILE --master {cluster.url}")
    return 0


def handle_add(options: argparse.Namespace) -> int:
    with _progress() as progress:
        nodes = manage.add(options.nodes, ensure_java(), progress)
    print(f"{', '.join(node.name for node in nodes)} joined; what runs uses it from its next replacement on")
    return 0


def handle_drain(options: argparse.Namespace) -> int:
    name = options.node
    with _progress() as progress:
        manage.decommission(name)
        empty = _empty(name, options.seconds, progress)
        if not empty and not options.force:
            raise EnvironmentFault(
                f"node '{name}'",
                f"it was not empty within {options.seconds:g} s: "
                + (
                    ", ".join(f"'{run.topology}' has {slots} workers there" for run, slots in _on_node(name))
                    or f"{len(manage.executors(name))} processes run there"
                ),
                f"It takes nothing new. Drain it again, or with --force. {_LEFT}",
            )
        progress(f"removing {name} …")
        manage.remove(name)
    print(f"{name} is gone" + ("" if empty else "; what ran there starts again on the other nodes"))
    return 0


def _empty(node: str, seconds: float, progress: Progress) -> bool:
    """Have all topologies leave a node, also those that are just being started, each asked once."""
    asked: set[Run] = set()
    deadline = time.monotonic() + seconds
    while not manage.await_empty(node, min(_LOOK, max(0.0, deadline - time.monotonic())), progress):
        for run, slots in _on_node(node):
            if run in asked:
                continue
            asked.add(run)
            progress(f"'{run.topology}' leaves {node} …")
            try:
                run.ask(OperatorRequest("scale", {"parallelism": {}, "reason": f"{node} is drained"}), None)
                print(f"'{run.topology}' has left {node}, where it had {slots} slots")
            except PenstockError as error:
                print(f"'{run.topology}' keeps {slots} slots on {node}: {error}", file=sys.stderr)
        if time.monotonic() > deadline:
            return False
    return True


def handle_status(options: argparse.Namespace) -> int:
    cluster, nodes = manage.statuses()
    slots = {status.node.name: _topologies(status.node.name) for status in nodes}
    if options.json:
        print(json.dumps(_as_json(cluster, nodes, slots)))
        return 0
    table = Table(box=None, pad_edge=False)
    for column in ("node", "address", "state", "executors", "sent", "received", "topologies"):
        table.add_column(column, justify="right" if column in ("executors", "sent", "received") else "left")
    for status in nodes:
        node = status.node
        there = ", ".join(f"{topology} ({count} slots)" for topology, count in slots[node.name].items())
        passed = ["" if count is None else number(count) for count in (status.sent, status.received)]
        table.add_row(node.name, node.host, status.state, str(status.executors), *passed, there)
    rate = cluster.network.rate if cluster.network is not None else None
    print(
        f"master {cluster.url}, {cluster.slots} slots a node" + (f", links {rate / 1e6:g} Mbit/s" if rate else "")
    )
    if not cluster.ready:
        print("not completely up: penstock cluster down removes it")
    Terminal().print(table)
    print(f"logs in {cluster.work}, Spark's page http://{cluster.host}:{cluster.web_port}")
    return 0


def handle_down(options: argparse.Namespace) -> int:
    with _progress() as progress:
        there = manage.down(progress)
    print("the cluster is gone" if there else "there is no cluster")
    return 0


def _as_json(
    cluster: ClusterRecord, nodes: list[NodeStatus], slots: dict[str, dict[str, int]]
) -> dict[str, object]:
    """Without its secret."""
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
                "sent": status.sent,
                "received": status.received,
                "topologies": slots[status.node.name],
            }
            for status in nodes
        ],
    }


def _topologies(node: str) -> dict[str, int]:
    return {run.topology: slots for run, slots in _on_node(node)}


def _on_node(node: str) -> list[tuple[Run, int]]:
    """Topologies that have slots on a node, and how many."""
    found = []
    for run in runs.running():
        try:
            slots = parse_json(run.ask(OperatorRequest("status")))["slots"]
        except ControlRefused:
            continue  # just ended
        there = sum(1 for slot in slots if slot["pid"] is not None and manage.node_of(slot["pid"]) == node)
        if there:
            found.append((run, there))
    return found


@contextmanager
def _progress() -> Iterator[Progress]:
    """A line that changes on a terminal; elsewhere nothing."""
    with Terminal(file=sys.stderr).status("looking …") as spinner:
        yield lambda line: spinner.update(Text(printable(line)))  # names may look like markup
