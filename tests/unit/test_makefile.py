"""Targets that take arguments."""

import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_make_kafka_takes_topics():
    done = subprocess.run(
        ["make", "-n", "kafka", "TOPICS=lines orders:4"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert "penstock.testing.servers.kafka --topic lines --topic orders:4\n" in done.stdout
