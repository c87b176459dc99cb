"""The entry point: parse, run the command, end with the right exit code and no stack trace of ours.

Exit codes: 0 done, 2 bad input (usage, file, settings, topology), 3 the surroundings lack something (Java, a
master, a port, slots), 4 the topology failed while running, 1 anything unexpected.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence

import penstock
from penstock.cli import (
    activation,
    bench,
    cluster,
    dlq,
    drain,
    kill,
    placement,
    plan,
    prepare,
    queues,
    run,
    savepoint,
    scale,
    status,
)
from penstock.cli import list as list_
from penstock.cli import set as set_
from penstock.errors import PenstockError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="penstock",
        description="Storm's topologies in Python, on Spark's Real-Time Mode.",
        epilog="Exit codes: 0 done, 2 bad input, 3 something is missing here, 4 the topology failed.",
    )
    parser.add_argument("--version", action="version", version=f"penstock {penstock.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    running = (list_, status, queues, placement, set_, scale, activation, kill)
    for command in (run, plan, *running, savepoint, drain, dlq, cluster, bench, prepare):
        command.add_parser(commands)
    options = parser.parse_args(arguments)
    _log_to_terminal()
    try:
        code: int = options.handler(options)
        return code
    except PenstockError as error:
        print(f"penstock: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("penstock: stopped", file=sys.stderr)
        return 130


def _log_to_terminal() -> None:
    """Show warnings of ours. Others' stay silent unless the user's file sets up logging: py4j writes a stack
    trace to the root logger when the JVM goes away, and the supervisor says that in a sentence."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    logging.getLogger("penstock").addHandler(handler)
    logging.getLogger().addHandler(logging.NullHandler())


if __name__ == "__main__":
    sys.exit(main())
