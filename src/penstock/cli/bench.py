"""``penstock bench NAME``: run a benchmark. Needs a source checkout."""

from __future__ import annotations

import argparse

from penstock.cli.checkout import import_benchmark

NAMES = (
    "ladder",
    "peers",
    "delivery",
    "state",
    "backpressure",
    "migration",
    "persistence",
    "replacement",
    "energy",
    "monitor",
    "fit",
    "restart",
)


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("bench", help="run a benchmark: " + ", ".join(NAMES))
    parser.add_argument("name", choices=NAMES, help="the benchmark")
    parser.add_argument("--quick", action="store_true", help="run a short form, if possible under a minute")
    parser.add_argument("--json", metavar="PATH", help="write machine, rows and bars to this file")
    parser.add_argument("--repeats", type=int, metavar="N", help="number of measurements; medians are reported")
    parser.add_argument(
        "--seed", type=int, metavar="N", help="seed of the first measurement (of migration; default: its own)"
    )
    parser.add_argument("--only", metavar="PART", action="append", help="run only this part (repeatable)")
    parser.add_argument(
        "--text",
        metavar="PATH",
        help="text for the word count from Kafka (default: generated lines with the same statistics)",
    )
    parser.set_defaults(handler=handle)


def handle(options: argparse.Namespace) -> int:
    module = import_benchmark("penstock bench", options.name)
    code: int = module.main(options)
    return code
