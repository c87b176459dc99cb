"""Checks the pages on placement: the example prints the output shown, and the defaults are correct."""

from __future__ import annotations

import inspect
import re
from dataclasses import astuple
from pathlib import Path

from penstock.control.energy import PowerModel
from penstock.control.erdm import ErdmPolicy

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = (DOCS / "how-to" / "placement.md").read_text()
CONCEPTS = (DOCS / "concepts" / "placement.md").read_text()


def test_the_example_prints_what_is_shown(capsys):
    code, shown = re.search(r"```python\n(.*?)```\n\n```\n(.*?)```", PAGE, re.S).groups()
    exec(code, {})
    assert capsys.readouterr().out == shown


def test_the_defaults_are_those():
    settings = inspect.signature(ErdmPolicy).parameters
    told = dict(re.findall(r"^\| `(slack|fill)` \| (\S+) \|", PAGE, re.M))
    assert told == {"slack": f"{settings['slack'].default:g}", "fill": str(settings["fill"].default)}
    watts = re.search(r"Defaults: ([\d, ]+) W", CONCEPTS).group(1)
    assert tuple(map(float, watts.split(", "))) == astuple(PowerModel())
