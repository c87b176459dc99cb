"""The entry point of ``penstock``: parses the arguments, runs the command and returns its exit code.

Exit codes: 0 success; 2 invalid input (usage, file, settings, topology); 3 something is missing in the environment
(Java, a master, a port, slots); 4 the topology failed while it ran; 5 the topology ended, but tuples in flight or
its last epoch are unfinished; 6 the topology ended, but every tuple of one of its components failed; 130, 143 and
129 stopped by SIGINT, SIGTERM and SIGHUP; 141 the reader of the output closed the pipe; 1 an unexpected error.
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
    reproduce,
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
    """Run a command and return its exit code. Tests pass the arguments; the console script passes none."""
    if arguments is not None:  # called by a test: leave the process's signal handlers alone
        return _run(arguments)
    raise_on_signals()
    try:
        redact_tracebacks()
        try:
            code = _run(None)
        finally:
            _end_spark()
        leave_on_signals(code)
    except Interrupted as interrupt:  # before the command began or after it ended
        code = _stopped(interrupt)
        _end_spark()
        leave_on_signals(code)
    return code


def make_parser() -> argparse.ArgumentParser:
    """The parser of ``penstock`` with all commands; the pages of the documentation are made from it too."""
    parser = argparse.ArgumentParser(
        prog="penstock",
        description="Runs Storm topologies written in Python on Spark's Real-Time Mode.",
        epilog="Exit codes: 0 success, 2 invalid input, 3 something is missing in the environment, 4 the topology "
        "failed, 5 it ended with unfinished work, 6 every tuple of a component failed.",
    )
    parser.add_argument("--version", action="version", version=f"penstock {penstock.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    running = (list_, status, queues, placement, set_, scale, activation, kill)
    for command in (run, plan, *running, savepoint, drain, dlq, cluster, bench, reproduce, prepare):
        command.add_parser(commands)
    return parser


def _run(arguments: Sequence[str] | None) -> int:
    parser = make_parser()
    try:
        options = parser.parse_args(arguments)
        _log_to_terminal()
        code: int = options.handler(options)
        sys.stdout.flush()  # now, while BrokenPipeError is handled, and not when Python exits
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
    """However the command ended, leave no JVM behind."""
    if "penstock.spark.session" in sys.modules:
        from penstock.spark.session import abandon_session

        abandon_session()


def _discard_output() -> None:
    """Redirect standard output to the null device: its reader has closed the pipe, as in ``penstock plan FILE |
    head -3``. Otherwise Python would raise again when it flushes the buffer at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _ToStandardError(logging.Handler):
    """Writes to the current ``sys.stderr``. While a live view or a spinner is shown, that is rich's replacement,
    which prints the line above the view."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            print(printable(self.format(record), multiline=True), file=sys.stderr, flush=True)
        except Exception:
            self.handleError(record)


def _log_to_terminal() -> None:
    """Show the warnings of Penstock on standard error. Warnings of other libraries stay hidden unless the user's
    file configures logging: py4j logs a stack trace when the JVM ends, which Penstock reports in a sentence.
    Calling this again has no effect."""
    ours = logging.getLogger("penstock")
    if any(isinstance(each, _ToStandardError) for each in ours.handlers):
        return
    handler = _ToStandardError()
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    ours.addHandler(handler)
    logging.getLogger().addHandler(logging.NullHandler())


if __name__ == "__main__":
    sys.exit(main())
