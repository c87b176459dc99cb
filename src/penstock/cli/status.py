"""``penstock status TOPOLOGY``: show components, workers, decisions and errors of a running topology."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from penstock.cli.view import (
    age,
    component_table,
    duration,
    line,
    number,
    plain_text,
    result_table,
    size,
    wide_console,
)
from penstock.control.energy import Energy
from penstock.driver import discovery
from penstock.driver.discovery import DriverEntry
from penstock.errors import ControlRefused
from penstock.metrics.bus import ComponentView
from penstock.protocol.requests import OperatorRequest
from penstock.redaction import printable
from penstock.texts import parse_json

_INTERVAL = 0.5  # seconds between two updates with --watch; workers report at about the same interval
_HANGS = 5.0  # seconds in one call of a component's code after which the call is reported
_SHOWN = 8  # newest decisions and errors on the screen; --json has more

_COLUMNS = [spec.name for spec in dataclasses.fields(ComponentView)]


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "status",
        help="show a running topology",
        description="Shows components, workers, rate limits, decisions with their reasons, the last errors, and "
        "the results that components publish.",
    )
    parser.add_argument("topology", help="the topology's name (see penstock list)")
    parser.add_argument(
        "--json",
        action="store_true",
        help="print a JSON object; with --watch one per line (see docs/reference/status.md)",
    )
    parser.add_argument("--watch", action="store_true", help="update the output until the topology ends or Ctrl-C")
    parser.set_defaults(handler=handle)


def handle(options: argparse.Namespace) -> int:
    run = discovery.find(options.topology)
    if not options.watch:
        status = _ask(run)
        if options.json:
            print(json.dumps(status, indent=2))
        else:
            wide_console().print(render(status))
        return 0
    try:
        _watch(run, options.json)
    except ControlRefused:
        if run in discovery.running():
            raise
        print(f"'{run.topology}' has ended")
    return 0


def _watch(run: DriverEntry, as_json: bool) -> None:
    if as_json:
        while True:
            print(json.dumps(_ask(run)), flush=True)
            time.sleep(_INTERVAL)
    with Live(render(_ask(run)), auto_refresh=False) as live:
        while True:
            time.sleep(_INTERVAL)
            live.update(render(_ask(run)), refresh=True)


def _ask(run: DriverEntry) -> dict[str, Any]:
    status: dict[str, Any] = parse_json(run.ask(OperatorRequest("status")))
    return status


def render(status: Mapping[str, Any]) -> RenderableType:
    """The JSON status as tables and lines."""
    title = f"{status['topology']}  {status['state']}  {duration(status['uptime'])}  {status['delivery']}"
    if status["epoch"]:
        title += f"  epoch {status['epoch']} committed{age(status['commit_age'])}"
    title += f"  restarts {status['restarts']}  process {status['pid']}"
    parts: list[RenderableType] = [
        component_table(title, [_view(row) for row in status["components"]]),
        _worker_table(status["workers"]),
        _text(_packing(status)),
    ]
    if status["ackers"]:
        parts.append(_acker_table(status["ackers"]))
    parts += [line(text) for text in task_lines(status["tasks"])]
    if status["nodes"]:
        if len(status["nodes"]) > 1 or status["placement"]:
            parts.append(_node_table(status["nodes"]))
        parts.append(Text(_energy(status["energy"])))
    if status["placement"]:
        newest = status["placement"][-1]
        parts.append(_text(f"placement, load sample of {_clock(newest['time'])}: {newest['text']}"))
    for row in status["components"]:
        if row["max_rate"] is not None:
            parts.append(_text(f"{row['component']}: max_rate {number(row['max_rate'])}/s"))
    parts += [result_table(row["component"], row["published"]) for row in status["components"] if row["published"]]
    for each in status["decisions"][-_SHOWN:]:
        parts.append(_text(f"{_clock(each['time'])} {each['kind']}: {each['text']}", style="yellow"))
    parts += [_text(f"{_clock(each['time'])} {each['text']}", style="red") for each in status["errors"][-_SHOWN:]]
    return Group(*parts)


def task_lines(tasks: Sequence[Mapping[str, Any]]) -> list[str]:
    """What the tables leave out: the lag of sources, rows written by sinks, calls that hang, sinks that wait for
    their system, late tuples, and tuples and rows that were given up."""
    lines = []
    for task in tasks:
        if task["in_call"] > _HANGS:
            lines.append(
                f"{task['task']} has been in one call of its component's code for {duration(task['in_call'])}"
            )
        if task["lag"]:
            each = ", ".join(f"{name} {number(lag)}" for name, lag in sorted(task["lag"].items()))
            lines.append(f"{task['task']} has {number(sum(task['lag'].values()))} records to read: {each}")
        if task["written"]:
            lines.append(f"{task['task']} has written {number(task['written'])} rows")
        if task["away"]:
            lines.append(f"{task['task']} has been waiting for its external system for {duration(task['away'])}")
        if task["late"]:
            lines.append(f"{task['task']} received {number(task['late'])} tuples too late for their windows")
        if task["given_up"]:
            lines.append(f"{task['task']} has given up {number(task['given_up'])} tuples or rows")
    return lines


def _text(text: str, style: str = "") -> Text:
    return Text(printable(text), style=style)


def _view(row: Mapping[str, Any]) -> ComponentView:
    limit = math.inf if row["limit"] is None else row["limit"]
    return ComponentView(**{**{name: row[name] for name in _COLUMNS}, "limit": limit})


def _worker_table(workers: list[dict[str, Any]]) -> Table:
    table = Table()
    for name in ("worker", "node"):
        table.add_column(name)
    for name in ("process", "CPU", "memory"):
        table.add_column(name, justify="right")
    table.add_column("tasks")
    for worker in workers:
        table.add_row(
            worker["worker"],
            _text(
                worker["node"] if worker["connected"] else "not connected", "" if worker["connected"] else "red"
            ),
            "-" if worker["pid"] is None else str(worker["pid"]),
            f"{worker['cpu']:.1f} s",
            size(worker["rss"]),
            plain_text(" ".join(worker["tasks"])),
        )
    return table


def _acker_table(ackers: list[dict[str, Any]]) -> Table:
    """The ackers. Of one that is a part of the driver the CPU time is not known."""
    table = Table()
    for name in ("acker", "node", "state"):
        table.add_column(name)
    for name in ("process", "open roots", "entries/s", "cores"):
        table.add_column(name, justify="right")
    for acker in ackers:
        table.add_row(
            str(acker["acker"]),
            _text(acker["node"] or "-"),
            acker["state"],
            "-" if acker["pid"] is None else str(acker["pid"]),
            number(acker["open_roots"]),
            number(acker["rate"]),
            "-" if acker["cores"] is None else f"{acker['cores']:.2f}",
        )
    return table


def _node_table(nodes: list[dict[str, Any]]) -> Table:
    """What executors and Spark's processes use on each node."""
    table = Table()
    table.add_column("node")
    for name in ("workers", "cores", "used by executors", "by Spark", "W"):
        table.add_column(name, justify="right")
    for node in nodes:
        used = [f"{node[name]:.2f}" for name in ("cores", "executor_cores", "spark_cores")]
        table.add_row(_text(node["node"]), str(node["workers"]), *used, f"{node['watts']:.0f}")
    return table


def _packing(status: Mapping[str, Any]) -> str:
    """How many workers there are and may be."""
    count, most = len(status["workers"]), status["most_workers"]
    text = f"{count} worker{'' if count == 1 else 's'}"
    text += ", one for each executor" if most is None else f", limit {most}"
    if status["blocking"]:
        text += f"; blocking, with workers of their own: {', '.join(status['blocking'])}"
    elif most is not None and count > most:
        text += "; workers with little to do are not counted"
    return text


def _energy(energy: Mapping[str, Any]) -> str:
    text = f"power {energy['watts']:,.0f} W, energy {Energy(energy['base'], energy['dynamic']).label}"
    if energy["measured"] is not None:
        text += f"; measured {energy['measured'] / 1e3:,.1f} kJ"
    return f"{text}; CPU {energy['cpu_seconds']:,.0f} s"


def _clock(seconds: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(seconds))
