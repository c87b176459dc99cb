"""``penstock placement TOPOLOGY``: where its executors should be, and why."""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

from penstock.coordinator import runs
from penstock.coordinator.messages import Command


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "placement",
        help="show what a running topology's placement would gain",
        description="The critical path, nodes at a limit, which executors would move where and why, which nodes "
        "would become free: by the newest window of the load monitor (setting monitor). Nothing is moved.",
    )
    parser.add_argument("topology", help="the topology's name (see penstock list)")
    parser.add_argument("--json", action="store_true", help="one JSON object (see docs/monitor.md)")
    parser.set_defaults(handler=handle)


def handle(options: argparse.Namespace) -> int:
    answer: dict[str, Any] = json.loads(runs.find(options.topology).ask(Command("placement")))
    if options.json:
        print(json.dumps(answer, indent=2))
        return 0
    if answer["ended"] is not None:
        print(f"by the window that ended at {time.strftime('%H:%M:%S', time.localtime(answer['ended']))}")
    print("\n".join(answer["lines"]))
    return 0
