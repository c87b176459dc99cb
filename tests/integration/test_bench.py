"""The short form of the benchmarks runs, and its JSON contains what readers rely on."""

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.spark


def bench(tmp_path, *arguments):
    path = tmp_path / "result.json"
    done = subprocess.run(
        [sys.executable, "-m", "penstock.cli.main", "bench", *arguments, "--quick", "--json", str(path)],
        capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout, json.loads(path.read_text())


def test_ladder_writes_machine_rows_and_bars(tmp_path):
    shown, result = bench(tmp_path, "ladder", "--only", "hops3", "--only", "idle")
    assert result["machine"]["cores"] >= 1
    assert [row["what"] for row in result["rows"]] == ["three hops at 1,000/s", "idle, 4 workers"]
    bars = {bar["name"]: bar for bar in result["bars"]}
    assert set(bars) == {"hops3.p50_ms", "hops3.p99_ms", "hops3.longest_gap_s", "idle.core_share"}
    assert 0 < bars["hops3.p50_ms"]["value"] <= bars["hops3.p99_ms"]["value"]
    assert bars["hops3.p50_ms"]["unit"] == "ms"
    assert "hops3.p50_ms = " in shown


def test_peers_measures_the_systems_it_is_asked_for(tmp_path):
    _, result = bench(tmp_path, "peers", "--only", "1/1/1", "--only", "penstock batch")
    (row,) = result["rows"]
    assert (row["case"], row["system"]) == ("1/1/1", "penstock batch")
    assert row["words/s"] > 10_000


def test_migration_in_the_simulator_is_near_to_the_paper(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # figures go to results/
    _, result = bench(tmp_path, "migration", "--only", "sim")
    bars = {bar["name"]: bar["value"] for bar in result["bars"]}
    sizes = [f"migration.sim.vs_credit.{size}" for size in ("500MB", "1GB", "2GB", "5GB")]
    assert set(bars) == {"migration.sim.vs_credit", *sizes}
    assert all(bars[size] > 0 for size in sizes), "migration takes less time than credits"
    assert list((tmp_path / "results").glob("*.png"))


def test_persistence_in_bulk_is_far_ahead_of_row_by_row(tmp_path):
    _, result = bench(tmp_path, "persistence", "--only", "stores", "--only", "queues")
    rates = {(row["what"], row["case"]): row.get("rows/s") for row in result["rows"]}
    assert rates["SQLite, append", "delayed"] > 5 * rates["SQLite, append", "row by row"]
    assert rates["Parquet, append", "delayed"] > 5 * rates["Parquet, append", "row by row"]
    assert ("put of 2 KB", "embedded") in rates


def test_scaling_in_the_simulator_is_a_part_of_the_benchmark_of_replacement(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # figures go to results/
    _, result = bench(tmp_path, "replacement", "--only", "sim")
    bars = {bar["name"]: bar["value"] for bar in result["bars"]}
    assert set(bars) == {"scaling.rate.steps", "scaling.failures.steps"}
    assert bars["scaling.rate.steps"] <= 2
