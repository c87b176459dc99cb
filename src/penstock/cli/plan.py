"""``penstock plan FILE``: show how a topology would run on Spark, without running it."""

from __future__ import annotations

import argparse

from penstock.cli.loading import load_topology, with_settings
from penstock.driver.kept_numbers import as_left, kept_texts
from penstock.errors import SettingError
from penstock.metrics.machine import usable_cores
from penstock.plan.model import Fit
from penstock.plan.planner import make_plan
from penstock.plan.render import as_mermaid, as_text


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("plan", help="show the workers of a topology, and what is fused in them")
    parser.add_argument("target", metavar="FILE[:OBJECT]", help="Python file that contains a topology")
    parser.add_argument(
        "--format", choices=("both", "text", "mermaid"), default="both", help="output format (default: both)"
    )
    parser.add_argument(
        "--workers",
        type=int,
        metavar="N",
        help="most workers; 0: as many as this machine has cores (default: the setting workers)",
    )
    parser.add_argument(
        "--set",
        dest="assignments",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="change a setting, as with penstock run (repeatable)",
    )
    parser.set_defaults(handler=handle)


def handle(options: argparse.Namespace) -> int:
    topology = as_left(with_settings(load_topology(options.target), options.assignments))
    if options.workers is not None and options.workers < 0:
        raise SettingError("--workers", f"it must be at least 0, not {options.workers}")
    settings = topology.settings
    workers = options.workers or settings.workers.count
    if not workers and not (settings.placement.by_executor and options.workers is None):
        workers = usable_cores()
    plan = make_plan(topology, Fit(workers or None))
    parts = []
    if options.format in ("both", "text"):
        parts.append(as_text(topology, plan))
        if kept := kept_texts(topology):
            parts.append("\n".join(["kept", *(f"  {component:16} {text}" for component, text in kept.items())]))
    if options.format in ("both", "mermaid"):
        parts.append(as_mermaid(topology, plan))
    print("\n\n".join(parts))
    return 0
