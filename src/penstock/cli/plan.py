"""``penstock plan FILE``: show how a topology would run on Spark, without running it."""

from __future__ import annotations

import argparse

from penstock.cli.loading import load_topology
from penstock.plan.planner import make_plan
from penstock.plan.render import as_mermaid, as_text


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("plan", help="show the stages, workers and groupings of a topology")
    parser.add_argument("target", metavar="FILE[:OBJECT]", help="Python file that contains a topology")
    parser.add_argument(
        "--format", choices=("both", "text", "mermaid"), default="both", help="output format (default: both)"
    )
    parser.set_defaults(handler=handle)


def handle(options: argparse.Namespace) -> int:
    topology = load_topology(options.target)
    plan = make_plan(topology)
    parts = []
    if options.format in ("both", "text"):
        parts.append(as_text(topology, plan))
    if options.format in ("both", "mermaid"):
        parts.append(as_mermaid(topology, plan))
    print("\n\n".join(parts))
    return 0
