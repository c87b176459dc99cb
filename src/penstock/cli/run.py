"""``penstock run FILE``: run a topology on Spark and watch it."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import logging
import sys
import time

from penstock.cli.background import Background
from penstock.cli.loading import load_again, load_topology
from penstock.cli.terminal import Terminal
from penstock.credentials import literal_secrets
from penstock.driver.status import TopologyStatus
from penstock.errors import PenstockError
from penstock.interrupts import StopSignals
from penstock.redaction import printable
from penstock.settings import Settings
from penstock.topology.builder import Topology

log = logging.getLogger("penstock.cli")

_LOOK = 0.1  # seconds between two looks at the topology and the signals
_LEFT_ALONE = 5.0  # seconds for a thread whose JVM was taken away: it meets errors and removes its files


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("run", help="run a topology on Spark until Ctrl-C")
    parser.add_argument("target", metavar="FILE[:OBJECT]", help="Python file with a topology")
    parser.add_argument(
        "--master",
        metavar="URL",
        help="where Spark runs: local[N], local-cluster[NODES,CORES,MB], spark://HOST:PORT (default: here)",
    )
    parser.add_argument(
        "--set",
        dest="assignments",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="change a setting, such as delivery=exactly_once or flow.load_factor=0.7; "
        "conf.NAME=VALUE hands a value to the components (repeatable)",
    )
    parser.add_argument(
        "--seconds", type=_seconds, metavar="N", help="end after so long (default: run until Ctrl-C)"
    )
    parser.add_argument(
        "--host", help="address the coordinator listens on (default: loopback, or what the master's nodes reach)"
    )
    parser.add_argument(
        "--port", type=_port, default=0, help="port the coordinator listens on (default: any free one)"
    )
    begin = parser.add_mutually_exclusive_group()
    begin.add_argument(
        "--from", dest="savepoint", metavar="SAVEPOINT", help="begin from a savepoint (see penstock savepoint)"
    )
    begin.add_argument(
        "--fresh", action="store_true", help="begin from nothing, forgetting what was committed before"
    )
    parser.add_argument(
        "--take-over",
        action="store_true",
        help="if the topology runs already on the same state directory, end that run (default: refuse to start)",
    )
    parser.add_argument(
        "--http",
        type=_port,
        metavar="PORT",
        help="serve /status, /metrics and /healthz on this port of loopback; 0: any free one (default: off)",
    )
    parser.add_argument("--plain", action="store_true", help="plain lines instead of the live view")
    parser.set_defaults(handler=handle)


def handle(options: argparse.Namespace) -> int:
    for key in literal_secrets(options.assignments):
        log.warning(
            "--set %s: every user of this machine can read the password in the list of processes. "
            "Write ${NAME}, in single quotes, and set the environment variable NAME.",
            key,
        )
    topology = _with(load_topology(options.target), options)
    from penstock.spark import submit  # noqa: F401 - a second of imports, while a signal still ends us by itself

    with StopSignals() as signals:
        return _Command(options, topology, signals).run()


class _Command:
    """One ``penstock run``. The main thread only shows and listens: what takes time runs on other threads, so that
    a signal interrupts nothing half-way. The first signal ends a start at once, and a running topology in order; a
    further one, while that takes time, ends everything at once."""

    def __init__(self, options: argparse.Namespace, topology: Topology, signals: StopSignals) -> None:
        from penstock.driver.handle import RunningTopology

        self._options, self._topology, self._signals = options, topology, signals
        self._console = Terminal(file=sys.stdout)
        self._running: RunningTopology | None = None

    def run(self) -> int:
        from penstock.web.server import StatusServer

        options, console = self._options, self._console
        with contextlib.ExitStack() as around:
            try:
                if options.http is not None:  # before Spark: a port that is taken is said at once
                    server = around.enter_context(StatusServer(self._status, options.http))
                    console.print(f"{server.url}/status, /metrics, /healthz", highlight=False, soft_wrap=True)
                with console.status("starting Spark and the topology …"):
                    started = self._start()
                if not started:
                    return self._stopped("stopped before the topology ran; nothing of it is left")
                try:
                    elapsed, outside = self._watch()
                except BrokenPipeError:  # nobody reads any more: end as after Ctrl-C, without a word
                    self._drain()
                    raise
                begun = time.monotonic()
                with console.status("letting tuples in flight finish …"):
                    drained = self._drain()
                draining = time.monotonic() - begun
                if not drained:
                    return self._stopped("ended at once: tuples in flight were not waited for")
                if outside:
                    console.print("ended from outside, by penstock kill", highlight=False)
                return self._sum_up(elapsed, draining)
            finally:
                self._close()

    def _status(self) -> TopologyStatus | None:
        return None if self._running is None else self._running.status()

    def _start(self) -> bool:
        """False: a signal came meanwhile, and what was started is gone."""
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
            start.wait(_LEFT_ALONE)
            return False
        self._running = running = start.result()
        running.internals.load = lambda target: _with(load_again(target), options)
        if running.internals.epoch:
            self._console.print(f"goes on from epoch {running.internals.epoch}", highlight=False)
        return True

    def _watch(self) -> tuple[float, bool]:
        """Show the topology until it is to end; seconds it ran, and whether another process has ended it."""
        from penstock.cli.view import make_view

        running, seconds, begun = self._running, self._options.seconds, time.monotonic()
        assert running is not None
        outside = False
        with make_view(self._console, self._options.plain) as view:
            while not self._signals.count and not (outside := running.wait(_LOOK)):
                elapsed = time.monotonic() - begun
                view.update(running.internals, elapsed)
                if seconds is not None and elapsed >= seconds:
                    break
        return time.monotonic() - begun, outside

    def _drain(self) -> bool:
        """False: another signal came meanwhile; then nobody waits for the tuples any more."""
        from penstock.spark.session import abandon_session

        assert self._running is not None
        end = Background("end", self._running.kill)
        if not end.wait_unless(self._signals):
            abandon_session(at_once=True)
            end.wait(_LEFT_ALONE)
            return False
        end.result()
        return True

    def _sum_up(self, elapsed: float, draining: float) -> int:
        from penstock.cli.view import summary

        assert self._running is not None
        text = summary(self._running.internals, elapsed, draining)
        wrapped_at_words = self._console.is_terminal  # elsewhere a line stays a line
        self._console.print(text, markup=False, highlight=False, soft_wrap=not wrapped_at_words)
        outcome = self._running.internals.outcome()
        for sentence in outcome.sentences:
            print(f"penstock: {printable(sentence, multiline=True)}", file=sys.stderr)
        return outcome.code

    def _stopped(self, sentence: str) -> int:
        print(f"penstock: {sentence}", file=sys.stderr)
        return 128 + self._signals.number

    def _close(self) -> None:
        """Whatever happened before: stop the topology and Spark, in order as long as no further signal comes."""
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
            with contextlib.suppress(PenstockError):  # the topology's own error, which is on its way already
                end.result()
        else:
            abandon_session(at_once=True)
            end.wait(_LEFT_ALONE)


def _with(topology: Topology, options: argparse.Namespace) -> Topology:
    """With the settings of the command line."""
    return dataclasses.replace(topology, settings=Settings.parse(options.assignments, base=topology.settings))


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise argparse.ArgumentTypeError(f"a topology runs for a number of seconds above 0; got {text}")
    return seconds


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"a port is a whole number from 0 to 65535; got {text}")
    return int(text)
