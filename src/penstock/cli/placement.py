"""``penstock placement TOPOLOGY``: show where its executors should run, and why."""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

from penstock.driver import discovery
from penstock.protocol.requests import OperatorRequest
from penstock.texts import parse_json


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "placement",
        help="show or apply the recommended placement of a running topology",
        description="Shows the critical path, the nodes at a limit, which executors should move where and why, "
        "and which nodes would become free, based on the newest load sample of the load monitor (setting "
        "monitor). Nothing moves without --apply or --move. With the setting placement=erdm the driver applies "
        "it after every load sample.",
    )
    parser.add_argument("topology", help="the topology's name (see penstock list)")
    parser.add_argument("--json", action="store_true", help="print a JSON object (see docs/reference/status.md)")
    do = parser.add_mutually_exclusive_group()
    do.add_argument("--apply", action="store_true", help="move the executors, and release nodes that become empty")
    do.add_argument(
        "--move",
        nargs=2,
        metavar=("WORKER", "NODE"),
        help="move one worker of bolts, such as 1.0 node-2/1 (see penstock status), to a spare slot of a node "
        "(setting placement.spare_slots)",
    )
    do.add_argument("--spread", action="store_true", help="request released nodes again, and use all nodes")
    parser.set_defaults(handler=handle)


def handle(options: argparse.Namespace) -> int:
    run = discovery.find(options.topology)
    if options.spread:
        more = int(run.ask(OperatorRequest("spread")))
        nodes = f"{more} more node" + ("" if more == 1 else "s")
        print(
            f"requested {nodes}; the topology uses them as soon as they have joined"
            if more
            else "all nodes are in use"
        )
        return 0
    if options.move:
        worker, node = options.move
        moved = parse_json(run.ask(OperatorRequest("move", {"worker": worker, "node": node}), None))
        print(json.dumps(moved, indent=2) if options.json else _describe(moved))
        return 0
    answer: dict[str, Any] = parse_json(run.ask(OperatorRequest("placement")))
    if not options.json:
        if answer["ended"] is not None:
            ended = time.strftime("%H:%M:%S", time.localtime(answer["ended"]))
            print(f"based on the load sample that ended at {ended}")
        print("\n".join(answer["lines"]))
    if options.apply and answer["plan"] is not None:
        done = run.ask(OperatorRequest("rearrange"), None)  # without a time limit
        answer["moved"] = parse_json(done) if done else None
        if not options.json:
            print(
                _describe(answer["moved"])
                if done
                else "nothing moved: no node would become free, and the benefit would be small"
            )
    if options.json:
        print(json.dumps(answer, indent=2))
    return 0


def _describe(done: dict[str, Any]) -> str:
    if "moves" in done:
        return "\n".join(
            f"worker {each['worker']} moved from {each['source']} to {each['target']}, "
            f"{each['gap'] * 1000:.0f} ms of interruption"
            for each in done["moves"]
        )
    return f"moved with {done['gap'] * 1000:.0f} ms of interruption, after {done['seconds']:.1f} s of preparation"
