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
from penstock.driver import runs
from penstock.driver.outcome import INCOMPLETE
from penstock.driver.runs import Run
from penstock.errors import ControlRefused, PenstockError
from penstock.protocol.requests import OperatorRequest
from penstock.texts import parse_json

_LOOK = 0.2  # seconds between two looks at how far it is
_PATIENCE = 30.0  # seconds for Spark to stop a query whose tasks are closed
_STOPPING = "stopping its query …"


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "kill",
        help="end a running topology",
        description="Pauses the spouts, lets tuples in flight finish, commits a last epoch, closes the tasks; "
        "penstock run then ends with its summary. Returns when the topology has ended.",
    )
    parser.add_argument("topology", help="the topology's name (see penstock list)")
    parser.add_argument(
        "--no-drain",
        dest="drain",
        action="store_false",
        help="leave tuples in flight: at most once they are lost, else they come again with the next start",
    )
    parser.set_defaults(handler=handle)


def handle(options: argparse.Namespace) -> int:
    run = runs.find(options.topology)
    with Terminal(file=sys.stderr).status("asking the topology …") as spinner:
        answer = _ask(run, OperatorRequest("kill", {"drain": options.drain}))
        while not _done(answer):
            spinner.update(_progress(run))
        spinner.update(_STOPPING)
        _await_end(run)
    try:
        left_behind = answer.result()
    except ControlRefused:
        left_behind = ""  # gone before it could answer; gone it is
    print(f"'{options.topology}' has ended" + (f"; {left_behind}" if left_behind else ""))
    return INCOMPLETE if left_behind else 0


def _ask(run: Run, command: OperatorRequest) -> Future[str]:
    answer: Future[str] = Future()

    def ask() -> None:
        try:
            answer.set_result(run.ask(command, None))
        except PenstockError as error:
            answer.set_exception(error)

    threading.Thread(target=ask, daemon=True).start()  # not the main one's: Ctrl-C ends the waiting
    return answer


def _await_end(run: Run) -> None:
    deadline = time.monotonic() + _PATIENCE
    while run in runs.running():
        if time.monotonic() > deadline:
            raise ControlRefused(
                f"topology '{run.topology}'",
                f"process {run.pid} still runs it {_PATIENCE:g} s after its tasks were closed",
                "Look at what penstock run prints there.",
            )
        time.sleep(_LOOK)


def _done(answer: Future[str]) -> bool:
    try:
        answer.exception(_LOOK)
    except StillBusy:
        return False
    return True


def _progress(run: Run) -> str:
    try:
        status = parse_json(run.ask(OperatorRequest("status")))
    except ControlRefused:
        return _STOPPING
    return f"letting tuples in flight finish: {number(status['pending'])} to go …"
