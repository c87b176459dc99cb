"""What the benchmark of the simulated cluster works out by itself."""

from __future__ import annotations

import pytest

from benchmarks.energy_sim import at_use


def test_what_erdm_can_save_falls_with_the_use_before():
    """At a half, nine machines are left at 89 %: 7 · 35 W of 16 · (35 + 26) W."""
    half = at_use(0.5)
    assert (half["released"], half["use after %"]) == (7, 89)
    assert half["energy %"] == pytest.approx(-100 * 7 * 35 / (16 * 61), abs=0.05)
    saved = [at_use(use)["energy %"] for use in (0.45, 0.5, 0.6, 0.7)]
    assert saved == sorted(saved)
    assert at_use(0.9)["released"] == 0
