"""Other systems with the same work, for comparison: ``penstock bench peers``. The programs of this package run in
processes of their own, so importing it must not import Penstock."""

from __future__ import annotations

import argparse


def main(options: argparse.Namespace) -> int:
    """``penstock bench peers``"""
    from benchmarks.peers import bench

    return bench.main(options)
