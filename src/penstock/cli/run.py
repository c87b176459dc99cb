"""``penstock run FILE``: run a topology on Spark and show its progress."""

from __future__ import annotations

import argparse
import contextlib
import logging
import sys
import time

from penstock.cli.background import Background
from penstock.cli.loading import load_again, load_topology, with_settings
from penstock.cli.terminal import Terminal
from penstock.credentials import literal_secrets
from penstock.driver.status import TopologyStatus
from penstock.errors import PenstockError
from penstock.interrupts import StopSignals
from penstock.redaction import printable
from penstock.topology.builder import Topology

log = logging.getLogger("penstock.cli")

_POLL_INTERVAL = 0.1  # seconds between two checks of the topology and the signals, and between updates of the view
_ABANDON_TIMEOUT = 5.0  # seconds for a thread whose JVM was stopped to fail and remove its files


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("run", help="run a topology on Spark until Ctrl-C")
    parser.add_argument("target", metavar="FILE[:OBJECT]", help="Python file that contains a topology")
    parser.add_argument(
        "--master",
        metavar="URL",
        help="where Spark runs: local[N], local-cluster[NODES,CORES,MB], spark://HOST:PORT (default: this "
        "machine)",
    )
    parser.add_argument(
        "--set",
        dest="assignments",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="change a setting, such as delivery=exactly_once or flow.load_factor=0.7; "
        "conf.NAME=VALUE passes a value to the components (repeatable)",
    )
    parser.add_argument(
        "--seconds", type=_seconds, metavar="N", help="end after N seconds (default: run until Ctrl-C)"
    )
    parser.add_argument(
        "--host",
        help="address the driver listens on for its workers (default: loopback, or the address that the master's "
        "nodes can reach)",
    )
    parser.add_argument(
        "--port",
        type=_port,
        default=0,
        help="port the driver listens on for its workers (default: any free port)",
    )
    begin = parser.add_mutually_exclusive_group()
    begin.add_argument(
        "--from", dest="savepoint", metavar="SAVEPOINT", help="start from a savepoint (see penstock savepoint)"
    )
    begin.add_argument("--fresh", action="store_true", help="start without state, and discard the committed state")
    parser.add_argument(
        "--take-over",
        action="store_true",
        help="if the topology already runs on the same state directory, end that run (default: refuse to start)",
    )
    parser.add_argument(
        "--http",
        type=_port,
        metavar="PORT",
        help="serve /status, /metrics and /healthz on this loopback port; 0 for any free port (default: off)",
    )
    parser.add_argument("--plain", action="store_true", help="print plain lines instead of the live view")
    parser.set_defaults(handler=handle)


def handle(options: argparse.Namespace) -> int:
    for key in literal_secrets(options.assignments):
        log.warning(
            "--set %s: every user of this machine can read the password in the list of processes. "
            "Write ${NAME} in single quotes, and set the environment variable NAME.",
            key,
        )
    topology = with_settings(load_topology(options.target), options.assignments)
    # Importing takes a second. It happens here, while a signal still ends the process by itself.
    from penstock.spark import submit  # noqa: F401

    with StopSignals() as signals:
        return _RunCommand(options, topology, signals).run()


class _RunCommand:
    """One ``penstock run``. The main thread only updates the view and handles signals; everything that takes time
    runs on other threads, so that a signal does not interrupt it half-way. The first signal cancels a start at
    once, and drains a running topology. A second signal during that time stops everything at once."""

    def __init__(self, options: argparse.Namespace, topology: Topology, signals: StopSignals) -> None:
        from penstock.driver.handle import RunningTopology

        self._options, self._topology, self._signals = options, topology, signals
        self._console = Terminal(file=sys.stdout)
        self._running: RunningTopology | None = None

    def run(self) -> int:
        from penstock.web.server import StatusServer

        options, console = self._options, self._console
        with contextlib.ExitStack() as stack:
            try:
                if options.http is not None:  # before Spark, so that a port in use is reported at once
                    server = stack.enter_context(StatusServer(self._status, options.http))
                    console.print(f"{server.url}/status, /metrics, /healthz", highlight=False, soft_wrap=True)
                with console.status("starting Spark and the topology …"):
                    started = self._start()
                if not started:
                    return self._stopped("stopped before the topology ran")
                try:
                    elapsed, killed = self._watch()
                except BrokenPipeError:  # the reader of the output is gone: end as after Ctrl-C, without a summary
                    self._drain()
                    raise
                begun = time.monotonic()
                with console.status("waiting for tuples in flight …"):
                    drained = self._drain()
                draining = time.monotonic() - begun
                if not drained:
                    return self._stopped("stopped at once, without waiting for tuples in flight")
                if killed:
                    console.print("ended by penstock kill", highlight=False)
                return self._sum_up(elapsed, draining)
            finally:
                self._close()

    def _status(self) -> TopologyStatus | None:
        return None if self._running is None else self._running.status()

    def _start(self) -> bool:
        """Start the topology. Returns False if a signal arrived meanwhile; then nothing is left running."""
        from penstock.spark.session import abandon_session
        from penstock.spark.submit import submit

        options = self._options
        start = Background(
            "start",
            lambda: submit(
                self._topology,
                options.master,
                options.host,
                options.port,
                options.savepoint,
                options.fresh,
                options.take_over,
            ),
        )
        if not start.wait_unless_any(self._signals):
            abandon_session()
            start.wait(_ABANDON_TIMEOUT)
            return False
        self._running = running = start.result()
        running.internals.load = lambda target: with_settings(load_again(target), options.assignments)
        if running.internals.epoch:
            self._console.print(f"restored epoch {running.internals.epoch}", highlight=False)
        return True

    def _watch(self) -> tuple[float, bool]:
        """Show the topology until it ends or a signal or the time limit ends it. Returns the seconds it ran, and
        whether another process ended it."""
        from penstock.cli.view import make_view

        running, seconds, begun = self._running, self._options.seconds, time.monotonic()
        assert running is not None
        killed = False
        with make_view(self._console, self._options.plain) as view:
            while not self._signals.count and not (killed := running.wait(_POLL_INTERVAL)):
                elapsed = time.monotonic() - begun
                view.update(running.internals, elapsed)
                if seconds is not None and elapsed >= seconds:
                    break
        return time.monotonic() - begun, killed

    def _drain(self) -> bool:
        """End the topology in order. Returns False if another signal arrived meanwhile; then Spark is stopped at
        once."""
        from penstock.spark.session import abandon_session

        assert self._running is not None
        end = Background("end", self._running.kill)
        if not end.wait_unless(self._signals):
            abandon_session(at_once=True)
            end.wait(_ABANDON_TIMEOUT)
            return False
        end.result()
        return True

    def _sum_up(self, elapsed: float, draining: float) -> int:
        from penstock.cli.view import summary

        assert self._running is not None
        text = summary(self._running.internals, elapsed, draining)
        wrapped_at_words = self._console.is_terminal  # in a file or pipe one line stays one line
        self._console.print(text, markup=False, highlight=False, soft_wrap=not wrapped_at_words)
        outcome = self._running.internals.outcome()
        for sentence in outcome.sentences:
            print(f"penstock: {printable(sentence, multiline=True)}", file=sys.stderr)
        return outcome.code

    def _stopped(self, sentence: str) -> int:
        print(f"penstock: {sentence}", file=sys.stderr)
        return 128 + self._signals.number

    def _close(self) -> None:
        """Stop the topology and Spark, however the command ended; a further signal stops both at once."""
        from penstock.spark.session import abandon_session, close_session

        running = self._running

        def close() -> None:
            try:
                if running is not None:
                    running.kill(drain=False)
            finally:
                close_session()

        end = Background("close", close)
        if end.wait_unless(self._signals):
            with contextlib.suppress(PenstockError):  # the topology's own error is already being raised
                end.result()
        else:
            abandon_session(at_once=True)
            end.wait(_ABANDON_TIMEOUT)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds above 0")
    return seconds


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text} is not a port: a whole number from 0 to 65535")
    return int(text)
