"""``penstock run FILE``: run a topology on Spark and watch it."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import signal
import sys
import time
from typing import Any

from rich.console import Console

from penstock.cli.loading import load_again, load_topology
from penstock.coordinator.status import Status
from penstock.topology.builder import Topology


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("run", help="run a topology on Spark until Ctrl-C")
    parser.add_argument("target", metavar="FILE[:OBJECT]", help="Python file with a topology")
    parser.add_argument(
        "--master",
        metavar="URL",
        help="where Spark runs: local[N], local-cluster[NODES,CORES,MB], spark://HOST:PORT (default: here)",
    )
    parser.add_argument(
        "--set",
        dest="assignments",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="change a setting; conf.NAME=VALUE hands a value to the components (repeatable)",
    )
    parser.add_argument("--seconds", type=float, metavar="N", help="end after so long (default: run until Ctrl-C)")
    parser.add_argument(
        "--host", help="address the coordinator listens on (default: loopback, or what the master's nodes reach)"
    )
    parser.add_argument(
        "--port", type=int, default=0, help="port the coordinator listens on (default: any free one)"
    )
    begin = parser.add_mutually_exclusive_group()
    begin.add_argument(
        "--from", dest="savepoint", metavar="SAVEPOINT", help="begin from a savepoint (see penstock savepoint)"
    )
    begin.add_argument(
        "--fresh", action="store_true", help="begin from nothing, forgetting what was committed before"
    )
    parser.add_argument(
        "--http",
        type=_port,
        metavar="PORT",
        help="serve /status, /metrics and /healthz on this port of loopback; 0: any free one (default: off)",
    )
    parser.add_argument("--plain", action="store_true", help="plain lines instead of the live view")
    parser.set_defaults(handler=handle)


def handle(options: argparse.Namespace) -> int:
    topology = _with(load_topology(options.target), options)
    from penstock.cli.view import make_view, summary
    from penstock.spark.session import close_session
    from penstock.spark.supervisor import RunningTopology, submit
    from penstock.web.server import StatusServer

    console = Console(file=sys.stdout)
    signal.signal(signal.SIGTERM, _as_interrupt)
    running: RunningTopology | None = None
    around = contextlib.ExitStack()

    def look() -> Status | None:
        return None if running is None else running.status()

    try:
        if options.http is not None:  # before Spark: a port that is taken is said at once
            server = around.enter_context(StatusServer(look, options.http))
            console.print(f"{server.url}/status, /metrics, /healthz", highlight=False, soft_wrap=True)
        with console.status("starting Spark and the topology …"):
            running = submit(
                topology, options.master, options.host, options.port, options.savepoint, options.fresh
            )
        running.load = lambda target: _with(load_again(target), options)
        if running.epoch:
            console.print(f"goes on from epoch {running.epoch}", highlight=False)
        begun, outside = time.monotonic(), False
        with make_view(console, options.plain) as view:
            try:
                while not (outside := running.wait(0.25)):
                    elapsed = time.monotonic() - begun
                    view.update(running, elapsed)
                    if options.seconds is not None and elapsed >= options.seconds:
                        break
            except KeyboardInterrupt:
                pass  # the way to end a topology
        elapsed = time.monotonic() - begun
        with console.status("letting tuples in flight finish …"):
            running.kill()
        if outside:
            console.print("ended from outside, by penstock kill", highlight=False)
        console.print(summary(running, elapsed), markup=False, highlight=False, soft_wrap=True)
        return 0
    finally:
        try:
            if running is not None:
                running.kill(drain=False)
        finally:
            around.close()
            close_session()


def _with(topology: Topology, options: argparse.Namespace) -> Topology:
    """With the settings of the command line."""
    return dataclasses.replace(topology, settings=topology.settings.parse(options.assignments))


def _port(text: str) -> int:
    port = int(text)
    if not 0 <= port <= 65535:
        raise argparse.ArgumentTypeError(f"a port is 0 to 65535; got {port}")
    return port


def _as_interrupt(number: int, frame: Any) -> None:
    raise KeyboardInterrupt
