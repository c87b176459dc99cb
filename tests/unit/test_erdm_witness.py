"""The witness of the benchmarks of Pu 2021 finds a tuple that is missing or processed twice."""

import dataclasses

import numpy as np
import pytest

from benchmarks.energy_auto import SHAPE
from benchmarks.erdm_topologies import TOPOLOGIES
from benchmarks.erdm_witness import came, witnessed, wrong_buckets
from penstock.testing import LocalRunner


def run(name, folder):
    topology = witnessed(TOPOLOGIES[name](SHAPE, 2_000.0), name)
    settings = dataclasses.replace(
        topology.settings,
        delivery=dataclasses.replace(topology.settings.delivery, guarantee="at_most_once", on_error="stop"),
        conf={"witness": str(folder), "scale": 0.01},
    )
    runner = LocalRunner(dataclasses.replace(topology, settings=settings))
    runner.run(0.4)
    runner.deactivate()
    runner.run_until_idle()
    assert runner.errors == []
    runner.close()
    source = topology.nodes["source"].component.spout
    source.begin(settings.conf)
    return source


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_the_results_of_a_run_are_right_and_a_change_is_found(name, tmp_path):
    source = run(name, tmp_path)
    words = "count" in name
    wrong, messages = wrong_buckets(tmp_path, source, words)
    assert wrong == 0
    assert messages > 100
    batches = came(tmp_path)
    assert (np.diff(batches.times) >= 0).all()
    assert batches.tuples.sum() == messages * (10 if words else 1)
    file = next(tmp_path.glob("results-*.npz"))
    with np.load(file) as found:
        counts, sums = found["counts"].copy(), found["sums"]
    counts[np.flatnonzero(counts)[0]] += 1
    np.savez(file, counts=counts, sums=sums)
    assert wrong_buckets(tmp_path, source, words)[0] == 1


def test_a_message_that_was_lost_is_found(tmp_path):
    source = run("sol", tmp_path)
    file = tmp_path / "emitted-0"
    index, spouts, emitted = (int(text) for text in file.read_text().split())
    file.write_text(f"{index} {spouts} {emitted + 1}")
    assert wrong_buckets(tmp_path, source, words=False)[0] == 1
