"""``penstock activate TOPOLOGY`` and ``penstock deactivate TOPOLOGY``."""

from __future__ import annotations

import argparse

from penstock.driver import discovery
from penstock.protocol.requests import OperatorRequest


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    for name, help, more in (
        ("activate", "resume the spouts of a running topology", ""),
        (
            "deactivate",
            "pause the spouts of a running topology",
            " Tuples in flight are still processed. The topology stays inactive, also across restarts of its "
            "query, until penstock activate.",
        ),
    ):
        parser = commands.add_parser(name, help=help, description=f"{help[0].upper()}{help[1:]}.{more}")
        parser.add_argument("topology", help="the topology's name (see penstock list)")
        parser.set_defaults(handler=handle, command=name)


def handle(options: argparse.Namespace) -> int:
    discovery.find(options.topology).ask(OperatorRequest(options.command))
    print(f"'{options.topology}' is {'active' if options.command == 'activate' else 'inactive'}")
    return 0
