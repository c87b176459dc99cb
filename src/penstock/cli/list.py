"""``penstock list``: show the running topologies of this user on this machine."""

from __future__ import annotations

import argparse
import json
from typing import Any

from rich.table import Table
from rich.text import Text

from penstock.cli.view import duration, number, wide_console
from penstock.driver import discovery
from penstock.driver.discovery import DriverEntry
from penstock.errors import PenstockError
from penstock.protocol.requests import OperatorRequest
from penstock.texts import parse_json

_ANSWER_TIMEOUT = 5.0  # seconds for one topology to answer: one that hangs must not block the whole list


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "list",
        help="list the running topologies",
        description="Lists the topologies of this user on this machine. in/s: tuples per second that the spouts "
        "emit; out/s: tuples per second that the bolts at the end of the topology receive.",
    )
    parser.add_argument("--json", action="store_true", help="print a JSON object for each topology")
    parser.set_defaults(handler=handle)


def handle(options: argparse.Namespace) -> int:
    every = [_row(run) for run in discovery.running()]
    if options.json:
        print(json.dumps(every, indent=2))
    elif every:
        wide_console().print(table(every))
    else:
        print("no topology of this user is running on this machine")
    return 0


def _row(run: DriverEntry) -> dict[str, Any]:
    row: dict[str, Any] = {"topology": run.topology, "pid": run.pid}
    try:
        status = parse_json(run.ask(OperatorRequest("status"), _ANSWER_TIMEOUT))
    except PenstockError as error:
        return {**row, "state": "no answer", "error": str(error)}
    row |= {name: status[name] for name in ("state", "uptime", "epoch", "restarts")}
    return {**row, "tasks": len(status["tasks"]), "rate_in": status["rate_in"], "rate_out": status["rate_out"]}


def table(rows: list[dict[str, Any]]) -> Table:
    result = Table()
    for name in ("topology", "state"):
        result.add_column(name)
    for name in ("process", "uptime", "epoch", "restarts", "tasks", "in/s", "out/s"):
        result.add_column(name, justify="right")
    for row in rows:
        known = "error" not in row
        result.add_row(
            Text(row["topology"]),
            row["state"],
            str(row["pid"]),
            duration(row["uptime"]) if known else "-",
            str(row["epoch"] or "-") if known else "-",
            *(str(row[name]) if known else "-" for name in ("restarts", "tasks")),
            *(number(row[name]) if known else "-" for name in ("rate_in", "rate_out")),
        )
    return result
