"""``penstock drain TOPOLOGY``: write what waits in a topology's delayed persistent queues to their stores."""

from __future__ import annotations

import argparse
import sys
import time

from rich.text import Text

from penstock.cli.terminal import Terminal
from penstock.clock import SystemClock
from penstock.errors import LoadError
from penstock.persist.processor import Processor
from penstock.persist.spec import ProcessorSpec, find
from penstock.redaction import printable
from penstock.settings import Settings
from penstock.state.store import StateStore


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "drain",
        help="write what waits in the delayed persistent queues",
        description="A topology that ends has a few seconds to empty the queues of its PersistBolts. What is left "
        "is safe there, and written by the next start or by this command. It may also be run beside the topology. "
        "Ends with 0 once the queues are empty, with 4 if they are not after --seconds.",
    )
    parser.add_argument("topology", help="the topology's name")
    parser.add_argument("--component", metavar="ID", help="only this one's queue")
    parser.add_argument(
        "--seconds", type=float, default=60.0, metavar="N", help="give up after so long (default: %(default)g)"
    )
    parser.add_argument(
        "--state-dir",
        metavar="DIR",
        default=Settings().delivery.state_dir,
        help="the topology's delivery.state_dir (default: %(default)s)",
    )
    parser.set_defaults(handler=handle)


def handle(options: argparse.Namespace) -> int:
    StateStore(options.state_dir).child(options.topology).check_owner()
    specs = [
        spec for spec in find(options.state_dir, options.topology) if options.component in (None, spec.component)
    ]
    if not specs:
        raise LoadError(
            f"{options.state_dir}",
            f"topology '{options.topology}' has no PersistBolt"
            + (f" '{options.component}'" if options.component else "")
            + " that has run here",
            "Check the names and --state-dir.",
        )
    until = time.monotonic() + options.seconds
    empty = [_drain(spec, until) for spec in specs]
    return 0 if all(empty) else 4


def _drain(spec: ProcessorSpec, until: float) -> bool:
    """Empty one queue, showing how far it is."""
    processor = spec.processor(SystemClock())
    try:
        with Terminal(file=sys.stderr).status("") as spinner:
            while not processor.empty and time.monotonic() < until:
                processor.turn(flush=True)
                spinner.update(Text(printable(_line(spec, processor))))
                time.sleep(min(processor.wait(), max(0.0, until - time.monotonic())))
        print(printable(_line(spec, processor)) + ("" if processor.empty else "; not all of it is written"))
        return processor.empty
    finally:
        processor.close()


def _line(spec: ProcessorSpec, processor: Processor) -> str:
    status = processor.report()
    line = f"{spec.component}: {status.written:,} rows written to {spec.store}"
    if status.rejected:
        line += f", {status.rejected:,} dead letters"
    if status.trouble:
        line += f"; attempt {status.attempts}: {status.trouble}"
    elif status.waiting:
        line += f", {status.waiting:,} bytes wait"
    return line
