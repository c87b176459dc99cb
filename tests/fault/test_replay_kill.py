"""A topology with replay is killed repeatedly: at the end every line is processed or a dead letter."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from penstock.replay import DiskQueue, ReplayRecord
from penstock.replay.embedded import open_beside

DEADLINE = 90.0
TOTAL = 4000
BAD = [f"{number} bad" for number in range(0, TOTAL, 211)]


def start(folder, source):
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.fault.replay_process", str(folder), source],
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
    )
    assert process.stdout.readline() == b"up\n"
    return process


def until(condition, process):
    end = time.monotonic() + DEADLINE
    while not condition():
        assert process.poll() is None, "it ended by itself"
        assert time.monotonic() < end
        time.sleep(0.005)  # another process's progress shows in its files only


@pytest.mark.parametrize("source", ["file", "queue"])
def test_kill_9_loses_no_line(tmp_path, source):
    lines = [f"{number} bad" if f"{number} bad" in BAD else str(number) for number in range(TOTAL)]
    (tmp_path / "lines.txt").write_text("\n".join(lines) + "\n")
    queue = DiskQueue(tmp_path / "queue", segment_bytes=4096)  # many segments, which are removed when released
    for first in range(0, TOTAL, 50):
        queue.append([ReplayRecord((line,)) for line in lines[first : first + 50]])
    queue.close()
    good = {line for line in lines if not line.endswith("bad")}
    seen = tmp_path / "seen.txt"

    def size():
        return seen.stat().st_size if seen.exists() else 0

    def dead():
        folders = [path.parent for path in (tmp_path / "state").rglob("replay/about.json")]
        if not folders:
            return []
        queues = open_beside(folders[0])
        dead_letters = [dead_letter.record for dead_letter in queues.dead.read_all()]
        queues.close()
        return dead_letters

    for turn in range(5):
        process = start(tmp_path, source)
        target = size() + 300 * (turn + 1)
        until(lambda target=target: size() >= target, process)
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
    process = start(tmp_path, source)
    until(lambda: good <= set(seen.read_text().split("\n")), process)
    until(lambda: {record.payload[0] for record in dead()} >= set(BAD), process)
    (tmp_path / "stop").touch()
    assert process.wait(DEADLINE) == 0
    process.stdout.close()
    dead_letters = dead()
    assert {record.payload[0] for record in dead_letters} == set(BAD)
    assert {record.attempts for record in dead_letters} == {8}
    assert all("cannot use" in record.error and record.component == "record" for record in dead_letters)
    assert set(seen.read_text().split()) == good
