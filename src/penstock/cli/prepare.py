"""``penstock prepare``: archive Spark's classes once, so that Spark starts faster."""

from __future__ import annotations

import argparse
import sys

from penstock.cli.terminal import Terminal


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("prepare", help="archive Spark's classes once, so that Spark starts faster")
    parser.set_defaults(handler=handle)


def handle(options: argparse.Namespace) -> int:
    from penstock.spark.class_archive import make_archive

    console = Terminal(file=sys.stdout)
    with console.status("archiving Spark's classes (about half a minute) …"):
        path = make_archive()
    if path.is_file():
        console.print(
            f"archived {path.stat().st_size / 1e6:.0f} MB of classes; Spark starts faster from now on",
            highlight=False,
        )
    else:
        console.print(
            "this Java made no archive; everything works, but Spark does not start faster", highlight=False
        )
    return 0
