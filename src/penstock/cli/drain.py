"""``penstock drain TOPOLOGY``: write the entries in a topology's delayed persistent queues to their stores."""

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
        help="write the delayed persistent queues to their stores",
        description="When a topology ends, its PersistBolts have a few seconds to write their queues. The "
        "remaining entries are safe on disk; the next run of the topology or this command writes them. The "
        "command may also run while the topology runs. The exit code is 0 if the queues are empty, and 4 if they "
        "are not empty after --seconds.",
    )
    parser.add_argument("topology", help="the topology's name")
    parser.add_argument("--component", metavar="ID", help="only the queue of this component")
    parser.add_argument(
        "--seconds", type=float, default=60.0, metavar="N", help="time limit in seconds (default: %(default)g)"
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
    """Write one queue until it is empty or the time is up, and show the progress. Returns whether it is empty."""
    processor = spec.processor(SystemClock())
    try:
        with Terminal(file=sys.stderr).status("") as spinner:
            while not processor.empty and time.monotonic() < until:
                processor.turn(flush=True)
                spinner.update(Text(printable(_line(spec, processor))))
                time.sleep(min(processor.wait(), max(0.0, until - time.monotonic())))
        print(printable(_line(spec, processor)) + ("" if processor.empty else "; some entries are not written"))
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
        line += f", {status.waiting:,} bytes are waiting"
    return line
