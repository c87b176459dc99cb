"""``penstock dlq``: list, show, send back and drop dead letters.

The command works on the files in the state directory, whether the topology runs or not, on the machine where its
tasks keep them. A spout's dead letters are sent back to its From queue, those of a PersistBolt to its delayed
persistent queue. Any process may append to these queues at any time: a running topology reads what was sent back
within a second, another one when it starts. With ``--kafka`` the command works on the spouts' topics instead.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table
from rich.text import Text

from penstock.cli.terminal import Terminal
from penstock.errors import LoadError
from penstock.persist.dead_letters import send_rows_back
from penstock.persist.spec import ProcessorSpec, find
from penstock.redaction import printable
from penstock.replay import state_dead_letters
from penstock.replay.dead_letters import DeadLetter, DeadLetterStore, DiskDeadLetterStore, drop, send_back
from penstock.replay.embedded import ABOUT, FOLDER, open_beside
from penstock.replay.queues import Queues
from penstock.replay.state_dead_letters import StateDeadLetterStore
from penstock.settings import Settings
from penstock.state.generations import newest_generation
from penstock.state.store import StateStore
from penstock.texts import parse_json

_PIPE_WIDTH = 250  # characters of a table row in a pipe: enough for all columns
_WIDEST = 60  # characters of a tuple or an error in the list: two such columns fit a wide terminal


@dataclass(frozen=True)
class _TaskDeadLetters:
    """The dead letters of one task."""

    component: str
    index: int
    dead: DeadLetterStore
    send_back: Callable[[Collection[int]], int] | None
    """Sends the dead letters with these ids back; None if the task has no queue that could take them."""
    close: Callable[[], None]

    @classmethod
    def of_spout(cls, component: str, index: int, queues: Queues) -> _TaskDeadLetters:
        return cls(component, index, queues.dead, lambda ids: send_back(queues, ids), queues.close)

    @classmethod
    def of_bolt(cls, spec: ProcessorSpec) -> _TaskDeadLetters:
        dead = DiskDeadLetterStore(Path(spec.dead))
        queue = spec.queue.open(spec.name, spec.folder)

        def close() -> None:
            dead.close()
            queue.close()

        return cls(spec.component, 0, dead, lambda ids: send_rows_back(dead, queue, ids), close)

    @classmethod
    def of_task(cls, component: str, index: int, dead: StateDeadLetterStore) -> _TaskDeadLetters:
        """The dead letters of a sink, a bolt or a spout without replay queues. They cannot be sent back, because
        the task has no queue."""
        return cls(component, index, dead, None, dead.close)

    def id(self, dead_letter: DeadLetter) -> str:
        """The id the user sees and types; unique within the topology."""
        return f"{self.component}.{self.index}.{dead_letter.id}"


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("dlq", help="list, show, send back or drop dead letters")
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, text in (
        ("list", "list all dead letters, one line each"),
        ("show", "show all details of one dead letter"),
        ("send-back", "let the topology process dead letters again, with a new count of attempts"),
        ("drop", "delete dead letters permanently"),
    ):
        action = actions.add_parser(name, help=text)
        if name == "show":
            action.add_argument("ids", metavar="ID", nargs=1, help="id shown by penstock dlq list")
        elif name != "list":
            action.add_argument("ids", metavar="ID", nargs="*", help="id shown by penstock dlq list")
            action.add_argument("--all", action="store_true", help="all dead letters")
        action.add_argument("--topology", metavar="NAME", required=True, help="the topology's name")
        action.add_argument(
            "--component",
            metavar="ID",
            help="only dead letters of this component (with --kafka: of this source topic)",
        )
        action.add_argument(
            "--state-dir",
            metavar="DIR",
            default=Settings().delivery.state_dir,
            help="the topology's delivery.state_dir (default: %(default)s)",
        )
        action.add_argument("--kafka", metavar="HOST:PORT", help="use the queues on this Kafka, not those on disk")
    parser.set_defaults(handler=handle)


def handle(options: argparse.Namespace) -> int:
    # A pipe has no edge to wrap at. One line per dead letter, so that grep finds it.
    console = Terminal(file=sys.stdout, width=None if sys.stdout.isatty() else _PIPE_WIDTH)
    try:
        return _handle(console, options)
    except OSError as error:
        if isinstance(error, BrokenPipeError):
            raise
        raise LoadError(
            "penstock dlq",
            f"a file of the queues cannot be read or written ({error})",
            "Check that file, then run the command again.",
        ) from error


def _handle(console: Terminal, options: argparse.Namespace) -> int:
    tasks = _find_on_kafka(options) if options.kafka else _find(options)
    try:
        found = {
            task.id(dead_letter): (task, dead_letter) for task in tasks for dead_letter in task.dead.read_all()
        }
        if options.action == "list":
            _list(console, options.topology, found)
            return 0
        chosen = found if getattr(options, "all", False) else _choose(found, options.ids)
        if options.action == "show":
            _show(console, *next(iter(chosen.items())))
            return 0
        if options.action == "send-back":
            chosen = _only_returnable(console, chosen, options.all)
        count = 0
        for task in tasks:
            ids = {dead_letter.id for owner, dead_letter in chosen.values() if owner is task}
            if options.action == "drop":
                count += drop(task.dead, ids)
            elif task.send_back is not None:
                count += task.send_back(ids)
        done = "sent back" if options.action == "send-back" else "dropped"
        console.print(f"{count} dead letter{'' if count == 1 else 's'} {done}", highlight=False)
        if count < len(chosen):
            console.print(
                f"{len(chosen) - count} no longer existed: another command had handled them", highlight=False
            )
        return 0
    finally:
        for task in tasks:
            task.close()


def _find(options: argparse.Namespace) -> list[_TaskDeadLetters]:
    """The dead letters of every task of the topology, wherever its folder is below the state directory. Raises if
    another user can change one of these folders."""
    state_dir, topology, component = Path(options.state_dir), options.topology, options.component
    root = StateStore(options.state_dir)
    root.child(topology).check_owner()
    abouts = {path: parse_json(path.read_text()) for path in sorted(state_dir.rglob(f"{FOLDER}/{ABOUT}"))}
    spouts = [(about, path.parent) for path, about in abouts.items() if about["topology"] == topology]
    bolts = find(options.state_dir, topology)
    stored = [
        (str(about["component"]), int(str(about["index"])), store)
        for about, store in state_dead_letters.find(options.state_dir)
        if about["topology"] == topology
    ]
    for _, folder in spouts:
        root.child(folder.relative_to(state_dir).as_posix()).check_owner()
    for _, _, store in stored:
        store.check_owner()
    owners = {about["component"] for about, _ in spouts} | {spec.component for spec in bolts}
    owners |= {owner for owner, _, _ in stored}
    if not owners and newest_generation(root.child(topology)):
        return []  # the topology has run here, without giving anything up
    if not owners:
        names = sorted({about["topology"] for about in abouts.values()})
        raise LoadError(
            f"{state_dir}",
            f"topology '{topology}' has no replay queues, PersistBolt or dead letters here"
            + (f"; found only those of {', '.join(names)}" if names else ""),
            "Check --topology and --state-dir. For queues on Kafka give --kafka HOST:PORT.",
        )
    if component is not None and component not in owners:
        raise LoadError(
            f"topology '{topology}'",
            f"component '{component}' keeps no dead letters here",
            f"These do: {', '.join(sorted(owners))}.",
        )
    spouts.sort(key=lambda spout: (spout[0]["component"], spout[0]["index"]))
    wanted = owners if component is None else {component}
    return [
        *(
            _TaskDeadLetters.of_spout(about["component"], about["index"], open_beside(folder))
            for about, folder in spouts
            if about["component"] in wanted
        ),
        *(_TaskDeadLetters.of_bolt(spec) for spec in bolts if spec.component in wanted),
        *(
            _TaskDeadLetters.of_task(owner, index, StateDeadLetterStore(store))
            for owner, index, store in sorted(stored, key=lambda each: each[:2])
            if owner in wanted
        ),
    ]


def _find_on_kafka(options: argparse.Namespace) -> list[_TaskDeadLetters]:
    from penstock.connectors.kafka_replay import stores_of

    tasks = [
        _TaskDeadLetters.of_spout(*found)
        for found in stores_of(options.kafka, options.topology, options.component)
    ]
    if not tasks:
        whose = f", source '{options.component}'" if options.component else ""
        raise LoadError(
            f"Kafka at {options.kafka}",
            f"topology '{options.topology}'{whose} has no replay queues here",
            f"Check the names: a topic is called {options.topology}.SOURCE.dead.",
        )
    return tasks


def _choose(
    found: dict[str, tuple[_TaskDeadLetters, DeadLetter]], ids: list[str]
) -> dict[str, tuple[_TaskDeadLetters, DeadLetter]]:
    if not ids:
        raise LoadError("penstock dlq", "no dead letters were chosen", "Give ids from the list, or --all.")
    unknown = [id for id in ids if id not in found]
    if unknown:
        raise LoadError(
            "penstock dlq",
            f"no dead letter has the id {', '.join(unknown)}",
            "penstock dlq list shows the ids. Nothing was changed.",
        )
    return {id: found[id] for id in ids}


def _only_returnable(
    console: Terminal, chosen: dict[str, tuple[_TaskDeadLetters, DeadLetter]], everything: bool
) -> dict[str, tuple[_TaskDeadLetters, DeadLetter]]:
    """The chosen dead letters that can be sent back. If the user named one that cannot, this raises before
    anything is changed. With ``--all`` the others stay, and the user is told so."""
    taken = {id: found for id, found in chosen.items() if found[0].send_back is not None}
    stay = len(chosen) - len(taken)
    if not stay:
        return taken
    owners = ", ".join(sorted({f"'{task.component}'" for task, _ in chosen.values() if task.send_back is None}))
    instead = (
        "Look at them with penstock dlq show, send the rows to the topology's source again (a Kafka topic, a "
        "file) or write them to the sink's system, then remove the dead letters with penstock dlq drop."
    )
    if not (everything and taken):
        raise LoadError(
            f"penstock dlq send-back, component {owners}",
            "only dead letters of a ReplaySpout or a PersistBolt can be sent back, and "
            f"{stay} of these belong to a component without a queue. Nothing was changed",
            instead,
        )
    console.print(
        printable(f"Not sent back: {stay} of {owners}, because there is no queue to send them to. {instead}"),
        highlight=False,
        markup=False,
    )
    return taken


def _list(console: Terminal, topology: str, found: dict[str, tuple[_TaskDeadLetters, DeadLetter]]) -> None:
    if not found:
        console.print(f"no dead letters in topology '{printable(topology)}'", markup=False, highlight=False)
        return
    table = Table(title=Text(f"dead letters of {topology}"), title_justify="left", expand=False)
    table.add_column("id", no_wrap=True)
    table.add_column("attempts", justify="right")
    for name in ("first failed", "failed at", "error", "tuple"):
        table.add_column(name)
    for id, (_, dead_letter) in found.items():
        record = dead_letter.record
        table.add_row(  # Text, because a user's value may look like markup
            Text(printable(id)),
            str(record.attempts),
            _time(record.first_failed),
            Text(printable(record.component or "timed out")),
            Text(printable(_short(record.error))),
            Text(printable(_short(repr(record.payload)))),
        )
    console.print(table)


def _show(console: Terminal, id: str, found: tuple[_TaskDeadLetters, DeadLetter]) -> None:
    task, dead_letter = found
    record = dead_letter.record
    lines = [
        f"id            {id}",
        f"kept by       {task.component}, task {task.index}",
        f"attempts      {record.attempts}",
        f"first failed  {_time(record.first_failed)}",
        f"failed at     {record.component or 'timed out'}",
        f"error         {record.error}",
        *(f"value {index:<7} {value!r}" for index, value in enumerate(record.payload)),
    ]
    for line in lines:
        console.print(printable(line, multiline=True), markup=False, highlight=False, soft_wrap=True)


def _time(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _WIDEST else line[: _WIDEST - 1] + "…"
