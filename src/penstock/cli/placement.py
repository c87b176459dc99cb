"""``penstock placement TOPOLOGY``: where its executors should be, and why."""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

from penstock.driver import runs
from penstock.protocol.messages import OperatorRequest
from penstock.texts import parse_json


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "placement",
        help="show where a running topology's executors should be, or have them move there",
        description="The critical path, nodes at a limit, which executors would move where and why, which nodes "
        "would become free: by the newest load sample of the load monitor (setting monitor). Nothing is moved without "
        "--apply or --move; with the setting placement=erdm it is by itself, after every load sample.",
    )
    parser.add_argument("topology", help="the topology's name (see penstock list)")
    parser.add_argument("--json", action="store_true", help="one JSON object (see docs/reference/load-database.md)")
    do = parser.add_mutually_exclusive_group()
    do.add_argument("--apply", action="store_true", help="have the executors move, and leave nodes that are empty")
    do.add_argument(
        "--move",
        nargs=2,
        metavar=("WORKER", "NODE"),
        help="have one worker of bolts move alone, as 1.0 node-2/1 (see penstock status), to a free slot there "
        "(setting placement.spare_slots)",
    )
    do.add_argument("--spread", action="store_true", help="take nodes back that were left, and use all of them")
    parser.set_defaults(handler=handle)


def handle(options: argparse.Namespace) -> int:
    run = runs.find(options.topology)
    if options.spread:
        more = int(run.ask(OperatorRequest("spread")))
        nodes = f"{more} more node" + ("" if more == 1 else "s")
        print(f"{nodes} asked for, used as soon as they have joined" if more else "all nodes are in use")
        return 0
    if options.move:
        worker, node = options.move
        moved = parse_json(run.ask(OperatorRequest("move", {"worker": worker, "node": node}), None))
        print(json.dumps(moved, indent=2) if options.json else _told(moved))
        return 0
    answer: dict[str, Any] = parse_json(run.ask(OperatorRequest("placement")))
    if not options.json:
        if answer["ended"] is not None:
            print(f"by the load sample that ended at {time.strftime('%H:%M:%S', time.localtime(answer['ended']))}")
        print("\n".join(answer["lines"]))
    if options.apply and answer["plan"] is not None:
        done = run.ask(OperatorRequest("rearrange"), None)  # as long as it takes
        answer["moved"] = parse_json(done) if done else None
        if not options.json:
            print(_told(answer["moved"]) if done else "nothing moved: no node becomes free, and little is saved")
    if options.json:
        print(json.dumps(answer, indent=2))
    return 0


def _told(done: dict[str, Any]) -> str:
    if "moves" in done:
        return "\n".join(
            f"worker {each['worker']} moved from {each['source']} to {each['target']}, "
            f"{each['gap'] * 1000:.0f} ms without it"
            for each in done["moves"]
        )
    return f"moved with {done['gap'] * 1000:.0f} ms without spouts, after {done['seconds']:.1f} s of preparation"
