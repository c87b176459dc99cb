"""Finds the benchmarks, which are in a source checkout only."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import penstock
from penstock.errors import LoadError


def import_benchmark(command: str, name: str) -> ModuleType:
    """Import ``benchmarks.NAME`` for a command of ``penstock``."""
    root = Path(penstock.__file__).resolve().parents[2]
    if not (root / "benchmarks").is_dir():
        raise LoadError(
            command,
            "it needs a source checkout, but this is an installed package",
            "Clone the repository and run it there.",
        )
    sys.path.insert(0, str(root))
    return importlib.import_module(f"benchmarks.{name}")
