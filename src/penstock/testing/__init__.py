"""Unit tests of topologies without Spark: a simulated clock and reproducible results.

>>> from penstock.testing import LocalRunner, run_bolt
"""

from penstock.testing.bolts import run_bolt, run_spout
from penstock.testing.doubles import CaptureBolt, FeederSpout, NumberSpout
from penstock.testing.runner import LocalRunner

__all__ = ["CaptureBolt", "FeederSpout", "LocalRunner", "NumberSpout", "run_bolt", "run_spout"]
