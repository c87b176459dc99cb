"""``penstock bench monitor`` in its short form."""

import argparse

from benchmarks import monitor
from benchmarks.harness import Results
from benchmarks.reproduction.registry import EXPERIMENTS


def test_it_measures_what_pu_2021_has_in_table_4():
    results = Results("monitor")
    options = argparse.Namespace(quick=True, repeats=1)
    monitor.measure_reports(results, options)
    monitor.measure_frame(results, options)
    *windows, frame = results.rows
    assert [row["what"] for row in windows] == [f"load samples of {seconds} s" for seconds in (10, 20, 30, 40, 50)]
    shares = [row["share_of_100_mbit"] for row in windows]
    assert shares == sorted(shares, reverse=True)
    assert 0 < shares[-1] < shares[0] < 0.1
    assert all(row["driver_cpu"] > 0 for row in windows)
    assert frame["ns"] > 0
    assert [bar["name"] for bar in results.bars] == [
        *(f"monitor.share.{seconds}" for seconds in (10, 20, 30, 40, 50)),
        "monitor.bytes_share",
        "monitor.driver_cpu",
        "monitor.frame_ns",
    ]


def test_the_delay_is_measured_until_a_load_sample_has_ended_and_is_stored(tmp_path):
    seconds = [monitor.measured_seconds(window) for window in monitor.WINDOWS]
    assert all(measured > window for measured, window in zip(seconds, monitor.WINDOWS, strict=True))
    assert ", ".join(f"{each:g}" for each in seconds[:-1]) in EXPERIMENTS["pu-delay"].duration
    settings = monitor.delayed_topology(10.0, tmp_path).settings.monitor
    assert (settings.store, settings.interval) == (str(tmp_path / "load.sqlite"), 10.0)
    assert monitor.delayed_topology(0.0, tmp_path).settings.monitor.store == "off"
