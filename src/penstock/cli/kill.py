"""``penstock kill TOPOLOGY``: end a running topology."""

from __future__ import annotations

import argparse
import sys
import threading
import time
from concurrent.futures import Future
from concurrent.futures import TimeoutError as StillBusy

from penstock.cli.terminal import Terminal
from penstock.cli.view import number
from penstock.driver import discovery
from penstock.driver.discovery import DriverEntry
from penstock.driver.outcome import INCOMPLETE
from penstock.errors import ControlRefused, PenstockError
from penstock.protocol.requests import OperatorRequest
from penstock.texts import parse_json

_POLL_INTERVAL = 0.2  # seconds between two updates of the spinner
_STOP_TIMEOUT = 30.0  # seconds; Spark needs a few to stop a query whose tasks are closed, more on a loaded machine
_STOPPING = "stopping the topology's query …"


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "kill",
        help="end a running topology",
        description="Pauses the spouts, waits until tuples in flight are processed, commits a last epoch and "
        "closes the tasks. penstock run then prints its summary and ends. Returns when the topology has ended.",
    )
    parser.add_argument("topology", help="the topology's name (see penstock list)")
    parser.add_argument(
        "--no-drain",
        dest="drain",
        action="store_false",
        help="do not wait for tuples in flight: with at_most_once delivery they are lost, otherwise the next run "
        "of the topology processes them again",
    )
    parser.set_defaults(handler=handle)


def handle(options: argparse.Namespace) -> int:
    run = discovery.find(options.topology)
    with Terminal(file=sys.stderr).status("sending the request …") as spinner:
        answer = _ask(run, OperatorRequest("kill", {"drain": options.drain}))
        while not _done(answer):
            spinner.update(_progress(run))
        spinner.update(_STOPPING)
        _await_end(run)
    try:
        left_behind = answer.result()
    except ControlRefused:
        left_behind = ""  # the topology ended before it could answer
    print(f"'{options.topology}' has ended" + (f"; {left_behind}" if left_behind else ""))
    return INCOMPLETE if left_behind else 0


def _ask(run: DriverEntry, command: OperatorRequest) -> Future[str]:
    answer: Future[str] = Future()

    def ask() -> None:
        try:
            answer.set_result(run.ask(command, None))
        except PenstockError as error:
            answer.set_exception(error)

    threading.Thread(target=ask, daemon=True).start()  # the main thread must stay free for Ctrl-C
    return answer


def _await_end(run: DriverEntry) -> None:
    deadline = time.monotonic() + _STOP_TIMEOUT
    while run in discovery.running():
        if time.monotonic() > deadline:
            raise ControlRefused(
                f"topology '{run.topology}'",
                f"process {run.pid} still runs it {_STOP_TIMEOUT:g} s after its tasks were closed",
                "See the output of penstock run in that process.",
            )
        time.sleep(_POLL_INTERVAL)


def _done(answer: Future[str]) -> bool:
    try:
        answer.exception(_POLL_INTERVAL)
    except StillBusy:
        return False
    return True


def _progress(run: DriverEntry) -> str:
    try:
        status = parse_json(run.ask(OperatorRequest("status")))
    except ControlRefused:
        return _STOPPING
    return f"waiting for {number(status['pending'])} tuples in flight …"
