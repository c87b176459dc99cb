"""The entry point: parse, run the command, end with the right exit code and no stack trace of ours.

Exit codes: 0 done, 2 bad input (usage, file, settings, topology), 3 the surroundings lack something (Java, a
master, a port, workers), 4 the topology failed while running, 5 it ended and left tuples in flight or its last
epoch behind, 6 it ended and one of its components did nothing but fail, 130 and 143 ended by SIGINT and SIGTERM,
141 nobody read the output any more, 1 anything unexpected.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
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
from penstock.interrupts import Interrupted, leave_on_signals, raise_on_signals
from penstock.redaction import printable, redact_tracebacks


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code."""
    if arguments is not None:  # a test that calls us, not a process of our own
        return _run(arguments)
    raise_on_signals()
    try:
        redact_tracebacks()
        try:
            code = _run(None)
        finally:
            _end_spark()
        leave_on_signals(code)
    except Interrupted as interrupt:  # before the command began, or behind its end
        code = _stopped(interrupt)
        _end_spark()
        leave_on_signals(code)
    return code


def make_parser() -> argparse.ArgumentParser:
    """The parser of ``penstock`` with all commands; the pages of the documentation are made from it too."""
    parser = argparse.ArgumentParser(
        prog="penstock",
        description="Storm's topologies in Python, on Spark's Real-Time Mode.",
        epilog="Exit codes: 0 done, 2 bad input, 3 something is missing here, 4 the topology failed, "
        "5 it ended with work left over, 6 a component did nothing but fail.",
    )
    parser.add_argument("--version", action="version", version=f"penstock {penstock.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    running = (list_, status, queues, placement, set_, scale, activation, kill)
    for command in (run, plan, *running, savepoint, drain, dlq, cluster, bench, prepare):
        command.add_parser(commands)
    return parser


def _run(arguments: Sequence[str] | None) -> int:
    parser = make_parser()
    try:
        options = parser.parse_args(arguments)
        _log_to_terminal()
        code: int = options.handler(options)
        sys.stdout.flush()  # here, where a broken pipe is expected, and not when Python ends
        return code
    except PenstockError as error:
        print(f"penstock: {printable(str(error), multiline=True)}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt as interrupt:
        return _stopped(interrupt)
    except BrokenPipeError:
        _discard_output()
        return 128 + signal.SIGPIPE


def _stopped(interrupt: KeyboardInterrupt) -> int:
    print("penstock: stopped", file=sys.stderr)
    return interrupt.exit_code if isinstance(interrupt, Interrupted) else 128 + signal.SIGINT


def _end_spark() -> None:
    """Whatever a command was interrupted in, no JVM is left behind."""
    if "penstock.spark.session" in sys.modules:
        from penstock.spark.session import abandon_session

        abandon_session()


def _discard_output() -> None:
    """Nobody reads our output any more, as in ``penstock plan FILE | head -3``. What is still buffered would raise
    once more when Python ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _ToStandardError(logging.Handler):
    """Writes to what standard error is at the moment: while a live view or a spinner is shown, its own stand-in,
    which puts the line above it."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            print(printable(self.format(record), multiline=True), file=sys.stderr, flush=True)
        except Exception:
            self.handleError(record)


def _log_to_terminal() -> None:
    """Show warnings of ours. Others' stay silent unless the user's file sets up logging: py4j writes a stack
    trace to the root logger when the JVM goes away, and the supervisor says that in a sentence. Whoever calls
    ``main`` twice in a process sees each warning once."""
    ours = logging.getLogger("penstock")
    if any(isinstance(each, _ToStandardError) for each in ours.handlers):
        return
    handler = _ToStandardError()
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    ours.addHandler(handler)
    logging.getLogger().addHandler(logging.NullHandler())


if __name__ == "__main__":
    sys.exit(main())
