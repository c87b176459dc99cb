"""``penstock reproduce``: run the experiments of the papers and write the page that compares the results. Needs a
source checkout."""

from __future__ import annotations

import argparse
from pathlib import Path

from penstock.cli.checkout import import_benchmark


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("reproduce", help="run the experiments of the papers; write docs/reproduction.md")
    parser.add_argument(
        "--only",
        metavar="NAME",
        action="append",
        help="run only this experiment, table or figure, such as lu-fig15; may hold * (repeatable)",
    )
    parser.add_argument("--quick", action="store_true", help="short runs, one of each; about half an hour for all")
    parser.add_argument(
        "--repeats", type=_count, metavar="N", help="repeats of each experiment (default: 5; quick: 1)"
    )
    parser.add_argument("--fresh", action="store_true", help="run again what is already stored")
    parser.add_argument(
        "--list", action="store_true", help="show the experiments, what is stored, how long the rest takes"
    )
    parser.add_argument(
        "--write-only", action="store_true", help="run nothing; write the page from stored results"
    )
    parser.add_argument(
        "--text",
        metavar="PATH",
        type=_file,
        help="text for the word count from Kafka (default: generated lines with the same statistics)",
    )
    parser.add_argument("--json", metavar="PATH", help="write machine, rows and bars to this file")
    parser.add_argument("--results", metavar="FOLDER", help="folder of results (default: results/reproduction)")
    parser.add_argument("--docs", metavar="FOLDER", help="folder of the page (default: docs)")
    parser.set_defaults(handler=handle)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def _file(text: str) -> str:
    path = Path(text).resolve()  # experiments run in another folder
    if not path.is_file():
        raise argparse.ArgumentTypeError(f"there is no file {text!r}")
    return str(path)


def handle(options: argparse.Namespace) -> int:
    module = import_benchmark("penstock reproduce", "reproduction.command")
    code: int = module.main(options)
    return code
