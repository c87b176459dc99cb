"""``penstock set TOPOLOGY SPOUT.max_rate=N``: limit the rate of a spout of a running topology."""

from __future__ import annotations

import argparse
import math

from penstock.driver import discovery
from penstock.errors import SettingError
from penstock.protocol.requests import OperatorRequest


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "set",
        help="limit the rate of a spout",
        description="Limits how many tuples per second all tasks of a spout emit together, for example so that a "
        "backlog does not overload other systems. The limit holds until it is changed or the topology ends.",
    )
    parser.add_argument("topology", help="the topology's name")
    parser.add_argument(
        "assignments", nargs="+", metavar="SPOUT.max_rate=N", help="tuples per second, or none for no limit"
    )
    parser.set_defaults(handler=handle)


def handle(options: argparse.Namespace) -> int:
    rates = dict(map(_rate, options.assignments))
    discovery.find(options.topology).ask(OperatorRequest("set", dict(rates)))
    for spout, rate in rates.items():
        limit = "without a limit" if math.isinf(rate) else f"at most {rate:,g} tuples/s"
        print(f"'{spout}' of '{options.topology}' now emits {limit}")
    return 0


def _rate(text: str) -> tuple[str, float]:
    name, sign, value = text.partition("=")
    spout, _, what = name.rpartition(".")
    if not sign or not spout or what != "max_rate":
        raise SettingError(
            f"argument {text!r}",
            "it does not have the form SPOUT.max_rate=N",
            "Try penstock set TOPOLOGY lines.max_rate=1000.",
        )
    if value == "none":
        return spout, math.inf
    try:
        rate = float(value)
    except ValueError:
        rate = math.nan
    if not rate > 0:
        raise SettingError(
            f"{spout}.max_rate", f"{value!r} is neither a number of tuples per second above 0 nor none"
        )
    return spout, rate
