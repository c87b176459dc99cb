"""``penstock bench monitor`` in its short form."""

import argparse

from benchmarks import monitor
from benchmarks.harness import Results


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
