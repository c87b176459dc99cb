"""What the options of ``penstock bench fit`` mean for all of its parts."""

from __future__ import annotations

import argparse
from pathlib import Path


def repeats_of(options: argparse.Namespace) -> int:
    """How often each system is measured."""
    return options.repeats or (1 if options.quick else 3)


def figures(options: argparse.Namespace) -> Path:
    """The folder of the figures: that of the documentation for a run in full."""
    if options.quick:
        return Path(options.json).parent if options.json else Path("results")
    return Path("docs/figures")
