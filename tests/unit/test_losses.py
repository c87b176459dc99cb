"""What a restart says was lost."""

import os
import signal
import subprocess
import sys
import time

import pytest

from penstock.driver.losses import LostWorker, explain
from penstock.spark.exits import exit_status, note_exit

COUNT = LostWorker("1.0", ("count[0]", "count[1]"), 4711, "host/driver")
SPLIT = LostWorker("0.0", ("split[0]",), 4712, "host/1")


@pytest.mark.parametrize(
    ("status", "how"),
    [
        (-9, "was killed by signal 9 (SIGKILL); unless someone killed it, the machine ran out of memory"),
        (-11, "was killed by signal 11 (SIGSEGV)"),
        (-40, "was killed by signal 40"),
        (3, "ended with exit code 3"),
    ],
)
def test_the_first_process_and_how_it_ended(status, how):
    said = explain([COUNT, SPLIT], status, False, "SparkException: crashed")
    assert said == f"worker 1.0 (count[0], count[1]; process 4711 on host/driver) {how}"


def test_nobody_knows_how():
    assert explain([COUNT], None, False, "crashed") == f"{COUNT} was lost; Spark reports: crashed"


def test_an_executor_takes_its_workers_along():
    other = LostWorker("1.1", ("count[2]",), 4713, "host/1")
    said = explain([SPLIT, COUNT, other], -9, True, "ExecutorLostFailure")
    assert said == (
        "the Spark executor host/1 was lost, and with it worker 0.0 (split[0]; process 4712 on host/1), "
        "worker 1.1 (count[2]; process 4713 on host/1)"
    )


def test_no_worker_was_lost():
    assert explain([], None, False, "out of workers") == "Spark ended the query: out of workers"


def test_the_daemon_tells_how_a_worker_ended():
    """A child of a process with the daemon's handler is killed: the line it writes is understood here."""
    code = """
import os, signal, sys, time
from penstock.spark.daemon import _Signals
_Signals().signal(signal.SIGCHLD, signal.SIG_IGN)
pid = os.fork()
if not pid:
    time.sleep(60)
print(pid, flush=True)
os.kill(pid, signal.SIGKILL)
deadline = time.monotonic() + 10
while time.monotonic() < deadline:
    time.sleep(0.05)
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        break
"""
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ, capture_output=True, text=True, timeout=60, check=True
    )
    pid = int(done.stdout)
    (line,) = (line for line in done.stderr.splitlines() if str(pid) in line)
    assert note_exit(line)
    assert exit_status(pid, time.monotonic()) == -signal.SIGKILL


def test_other_lines_are_not_taken():
    assert not note_exit("a user printed this")
