"""Bytewax, a peer in Python. It is not one of the project's own requirements: the benchmark installs it, pinned by
hashes, into a folder of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.harness import run_json, say
from penstock.errors import EnvironmentFault

ROOT = Path(__file__).resolve().parents[2]
LOCK = Path(__file__).with_name("bytewax.lock")
INSTALLED = ROOT / "build" / "bytewax"


def install_bytewax() -> None:
    """Install Bytewax, if the pinned versions are not installed yet."""
    done = INSTALLED / "installed"
    if done.exists() and done.read_text() == LOCK.read_text():
        return
    say("installing Bytewax, about 10 MB …")
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--upgrade"]
    command += ["--target", str(INSTALLED), "--require-hashes", "--only-binary", ":all:", "-r", str(LOCK)]
    if subprocess.run(command, check=False).returncode:
        raise EnvironmentFault(
            "penstock bench fit",
            "Bytewax could not be installed",
            "It has wheels for Python 3.8 to 3.12. Leave this part out: see --only.",
        )
    done.write_text(LOCK.read_text())


def run_peer(module: str, warm_up: float, seconds: float, batch: int) -> dict[str, float]:
    """Run a program with ``bids.main`` in as many processes as there are cores, so that the cores are as busy as
    with Penstock. Returns the sum of the rates, and the bids per CPU second of all."""
    path = os.pathsep.join([str(ROOT), str(INSTALLED)])
    command = [sys.executable, "-m", f"benchmarks.peers.{module}", str(warm_up), str(seconds), str(batch)]
    cores = len(os.sched_getaffinity(0))
    with ThreadPoolExecutor(cores) as pool:
        started = [
            pool.submit(run_json, command, cwd=ROOT, env={**os.environ, "PYTHONPATH": path}) for _ in range(cores)
        ]
        found = [each.result() for each in started]
    cpu = sum(each["cpu_s"] for each in found)
    return {
        "per_s": sum(each["bids_per_s"] for each in found),
        "per_cpu_s": sum(each["bids"] for each in found) / cpu,
    }
