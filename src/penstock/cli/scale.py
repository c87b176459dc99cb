"""``penstock scale TOPOLOGY COMPONENT=N …``, ``penstock refit TOPOLOGY`` and ``penstock replace TOPOLOGY FILE``:
replace a running topology by another form of it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from typing import Any

from rich.text import Text

from penstock.cli.loading import split_target
from penstock.cli.terminal import Terminal
from penstock.driver import discovery
from penstock.errors import SettingError
from penstock.protocol.requests import OperatorRequest
from penstock.redaction import printable
from penstock.texts import parse_json

_HOW = (
    " Penstock starts the new form beside the running one and copies the state to it before it takes over, so "
    "that processing is interrupted only for a fraction of a second. The delivery guarantee holds throughout."
)


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    scale = commands.add_parser(
        "scale",
        help="change the parallelism of bolts of a running topology",
        description="Changes the parallelism of bolts of a running topology." + _HOW,
    )
    scale.add_argument("topology", help="the topology's name (see penstock list)")
    scale.add_argument(
        "assignments",
        nargs="+",
        metavar="COMPONENT=N",
        help="a bolt and its new parallelism (number of executors)",
    )
    scale.set_defaults(handler=handle_scale)
    refit = commands.add_parser(
        "refit",
        help="pack the components of a running topology into workers anew",
        description="Packs the components of a running topology into workers by their measured load." + _HOW,
    )
    refit.add_argument("topology", help="the topology's name (see penstock list)")
    refit.add_argument(
        "--workers",
        type=int,
        metavar="N",
        help="most workers from now on; 0: the cores of the master (default: as many as before)",
    )
    refit.set_defaults(handler=handle_refit)
    replace = commands.add_parser(
        "replace",
        help="replace the code of a running topology",
        description="Replaces a running topology by the one in a file, which must have the same name. Each "
        "component "
        "keeps its state." + _HOW,
    )
    replace.add_argument("topology", help="the topology's name (see penstock list)")
    replace.add_argument("target", metavar="FILE[:OBJECT]", help="Python file that contains the new topology")
    replace.set_defaults(handler=handle_replace)
    for parser in (scale, replace):
        parser.add_argument(
            "--stop-and-go",
            dest="pause",
            action="store_true",
            help="stop the running form first, if the master has no room for both; nothing runs for some seconds",
        )


def handle_scale(options: argparse.Namespace) -> int:
    numbers = dict(map(_number, options.assignments))
    return _ask(options.topology, OperatorRequest("scale", {"parallelism": numbers, "pause": options.pause}))


def handle_refit(options: argparse.Namespace) -> int:
    run = discovery.find(options.topology)
    with Terminal(file=sys.stderr).status(Text(f"'{printable(options.topology)}': preparing the new form …")):
        answer = run.ask(OperatorRequest("refit", {"workers": options.workers}), None)
    if not answer:
        print(f"'{options.topology}' is packed so already; nothing was done")
        return 0
    done: dict[str, Any] = parse_json(answer)
    count = done["workers"]
    print(f"{done['reason']}")
    print(f"'{options.topology}' has {count} worker{'' if count == 1 else 's'} now; {_gap(done)}")
    return 0


def handle_replace(options: argparse.Namespace) -> int:
    path, name = split_target(options.target)
    target = f"{path.resolve()}:{name}" if name else str(path.resolve())  # the topology may run in another folder
    return _ask(options.topology, OperatorRequest("replace", {"target": target, "pause": options.pause}))


def _ask(topology: str, command: OperatorRequest) -> int:
    run = discovery.find(topology)
    with Terminal(file=sys.stderr).status(Text(f"'{printable(topology)}': preparing the new form …")):
        done: dict[str, Any] = parse_json(run.ask(command, None))
    numbers = ", ".join(f"{component} {tasks}" for component, tasks in done["parallelism"].items())
    print(f"'{topology}' now runs with {numbers}; {_gap(done)}")
    if kept := ", ".join(f"{component} {tasks}" for component, tasks in done.get("kept", {}).items()):
        print(f"kept the numbers of tasks set by scaling, because the file's numbers have not changed: {kept}")
    if done["left_behind"]:
        print(done["left_behind"])
    return 0


def _gap(done: Mapping[str, Any]) -> str:
    return f"the interruption took {done['gap'] * 1000:.0f} ms"


def _number(text: str) -> tuple[str, int]:
    component, sign, value = text.partition("=")
    if not sign or not component or not value.isdecimal() or int(value) < 1:
        raise SettingError(
            f"argument {text!r}",
            "it does not have the form COMPONENT=N with N at least 1",
            "Try penstock scale TOPOLOGY count=4.",
        )
    return component, int(value)
