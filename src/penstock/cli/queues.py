"""``penstock queues TOPOLOGY``: show how full the inboxes of its tasks are."""

from __future__ import annotations

import argparse
import time

from rich.live import Live
from rich.table import Table
from rich.text import Text

from penstock.cli.view import number, wide_console
from penstock.driver import discovery
from penstock.driver.discovery import DriverEntry
from penstock.errors import SettingError
from penstock.metrics.bus import QueueView
from penstock.protocol.requests import OperatorRequest
from penstock.texts import parse_json

_FULL = 0.8  # share of the capacity above which an inbox is shown in yellow; the default of flow.load_factor


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "queues",
        help="show the inboxes of a running topology",
        description="Shows length, capacity and rates of every task's inbox, and the rate limits of senders.",
    )
    parser.add_argument("topology", nargs="?", help="the topology's name")
    parser.add_argument("--watch", action="store_true", help="update the table until Ctrl-C")
    parser.set_defaults(handler=handle)


def handle(options: argparse.Namespace) -> int:
    if options.topology is None:
        raise SettingError(
            "penstock queues", "the name of a topology is missing", "penstock list shows the names."
        )
    console = wide_console()
    run = discovery.find(options.topology)
    if not options.watch:
        console.print(table(run))
        return 0
    with Live(table(run), console=console, auto_refresh=False) as live:
        while True:
            time.sleep(0.5)
            live.update(table(run), refresh=True)


def table(run: DriverEntry) -> Table:
    rows = [QueueView(**row) for row in parse_json(run.ask(OperatorRequest("queues")))]
    result = Table(title=Text(run.topology), title_justify="left")
    result.add_column("task")
    for name in ("waiting", "capacity", "on disk", "in/s", "out/s", "limit/s"):
        result.add_column(name, justify="right")
    for row in rows:
        full = row.capacity and row.length > _FULL * row.capacity
        result.add_row(
            Text(row.task),
            Text(number(row.length) if row.capacity else "-", style="yellow" if full else ""),
            number(row.capacity) if row.capacity else "-",
            number(row.overflowing) if row.overflowing else "-",
            number(row.rate_in) if row.capacity else "-",
            number(row.rate_out) if row.capacity else "-",
            "-" if row.limit == float("inf") else number(row.limit),
        )
    return result
