"""``penstock bench NAME``: the benchmarks of a source checkout."""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

import penstock
from penstock.errors import LoadError

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
)


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("bench", help="measure: " + ", ".join(NAMES))
    parser.add_argument("name", choices=NAMES, help="which benchmark")
    parser.add_argument("--quick", action="store_true", help="a short form, under a minute where it can be")
    parser.add_argument("--json", metavar="PATH", help="write machine, rows and bars there")
    parser.add_argument("--repeats", type=int, metavar="N", help="how often to measure; medians are reported")
    parser.add_argument("--only", metavar="PART", action="append", help="only this part of it (repeatable)")
    parser.add_argument(
        "--text",
        metavar="PATH",
        help="the text of the word count from Kafka; without it a built-in generator makes lines of the same "
        "shape",
    )
    parser.set_defaults(handler=handle)


def handle(options: argparse.Namespace) -> int:
    root = Path(penstock.__file__).resolve().parents[2]
    if not (root / "benchmarks").is_dir():
        raise LoadError(
            "penstock bench",
            "it needs a source checkout, and this is an installed package",
            "Clone the repository and run it there.",
        )
    sys.path.insert(0, str(root))
    module = importlib.import_module(f"benchmarks.{options.name}")
    code: int = module.main(options)
    return code
