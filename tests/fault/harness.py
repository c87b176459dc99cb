"""Runs the driver of the fault tests, kills processes as the seed says, and compares the output with the input."""

import contextlib
import glob
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import psutil
import pyarrow.dataset as ds

from penstock.state import manifest as manifests
from penstock.state.snapshots import read_parts
from penstock.state.store import StateStore
from penstock.state.values import TaskState

ROOT = Path(__file__).resolve().parents[2]
DEADLINE = 180.0  # seconds for a whole run, on a busy machine
_MARK = "PENSTOCK_FAULT_RUN"
"""In the environment of a driver and of all it starts: the JVM has a session of its own, and what outlives its
parent is nobody's child any more."""


def marked(mark):
    """The environment for a driver whose processes ``started_by`` finds."""
    return {**os.environ, _MARK: mark}


def has_mark(pid, mark):
    """The process lives and was started by the driver with that mark."""
    try:
        return f"{_MARK}={mark}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False


def started_by(mark):
    """All processes of a driver that live, the driver among them."""
    return [pid for pid in psutil.pids() if has_mark(pid, mark)]


class Run:
    """One topology under fire."""

    name = "faults"

    def __init__(self, folder, seed, delivery, count=15_000, rate=3_000, master=None, **settings):
        self.folder, self.seed, self.delivery, self.count = Path(folder), seed, delivery, count
        self.random = random.Random(seed)
        self.faults = []
        """What was done: ⟨kind, seconds until there was new output⟩."""
        self.log = self.folder / "driver.log"
        self.config = {
            "name": self.name,
            "count": count,
            "rate": rate,
            "output": str(self.folder / "output"),
            "status": str(self.folder / "status.json"),
            "stop": str(self.folder / "stop"),
            "settings": {
                "delivery": delivery,
                "state_dir": str(self.folder / "state"),
                "epoch_interval": 0.5,
                "message_timeout": 5.0,
                "max_restarts": 1000,
                **settings,
            },
        }
        if master:
            self.config["master"] = master
        self.driver = None
        self.deadline = time.monotonic() + DEADLINE

    # ---- the driver ------------------------------------------------------------------------------------

    def start(self):
        self.launch()
        self.await_("the topology to run", lambda: self.status().get("executed", 0) > 0)

    def launch(self):
        """Start the driver's process."""
        path = self.folder / "config.json"
        path.write_text(json.dumps(self.config))
        (self.folder / "status.json").unlink(missing_ok=True)
        self.driver = subprocess.Popen(
            [sys.executable, "-m", "tests.fault.driver", str(path)],
            cwd=ROOT,
            stdout=self.log.open("ab"),
            stderr=subprocess.STDOUT,
            env=marked(str(self.folder)),
            start_new_session=True,
        )

    def stop(self):
        """Let it end by itself."""
        Path(self.config["stop"]).touch()
        code = self.driver.wait(60)
        assert code == 0, self.story()

    def close(self):
        if self.driver is not None and self.driver.poll() is None:
            driver = psutil.Process(self.driver.pid)
            for process in [*driver.children(recursive=True), driver]:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            self.driver.wait(30)

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *exception):
        self.close()

    def status(self):
        try:
            return json.loads((self.folder / "status.json").read_text())
        except (OSError, ValueError):
            return {}

    def await_(self, what, condition):
        while not condition():
            if self.driver.poll() is not None:
                raise AssertionError(f"the driver ended while waiting for {what}\n{self.story()}")
            if time.monotonic() > self.deadline:
                raise AssertionError(f"seed {self.seed}: waited too long for {what}\n{self.story()}")
            time.sleep(0.05)  # polls, because another process cannot be waited for

    def story(self):
        return f"seed {self.seed}, faults {self.faults}, status {self.status()}\n{self.log.read_text()[-3000:]}"

    # ---- faults ----------------------------------------------------------------------------------------

    def wait_a_while(self, least=0.3, most=2.0):
        """Until a random moment under load."""
        until = time.monotonic() + self.random.uniform(least, most)
        self.await_("a moment to strike", lambda: time.monotonic() > until and self.under_load())

    def under_load(self):
        status = self.status()
        return status.get("state") == "active" and bool(status.get("workers"))

    def recovered(self, kind, before):
        """Note a fault once a new start has new output or, where all input is through already, a new epoch."""
        struck = time.time()

        def back():
            status = self.status()
            restarted = status.get("pid") != before["pid"] or status.get("restarts", 0) > before["restarts"]
            return restarted and status["state"] == "active" and self.new_output(status)

        self._mark = None
        self.await_(f"recovery from a {kind} fault", back)
        self.faults.append((kind, round(time.time() - struck, 2)))

    def new_output(self, status):
        start = (status["pid"], status["restarts"])
        if self._mark is None or self._mark[0] != start:
            self._mark = (start, status["executed"], status["committed"])
            return False
        _, executed, committed = self._mark
        return status["executed"] > executed or status["committed"] > committed

    def kill_worker(self):
        before = self.status()
        worker = self.random.choice(sorted(before["workers"]))
        os.kill(before["workers"][worker], signal.SIGKILL)
        self.recovered("worker", before)

    def stall_worker(self):
        """Stop one for longer than a heartbeat may stay out, and let it go on when it has been replaced."""
        before = self.status()
        pid = before["workers"][self.random.choice(sorted(before["workers"]))]
        os.kill(pid, signal.SIGSTOP)
        try:
            self.recovered("stall", before)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def kill_executor(self):
        """One that runs a worker: an idle one is no loss."""
        before = self.status()
        worker = psutil.Process(before["workers"][self.random.choice(sorted(before["workers"]))])
        executor = next(parent.pid for parent in worker.parents() if parent.pid in before["executors"])
        os.kill(executor, signal.SIGKILL)
        self.recovered("executor", before)

    def kill_driver(self):
        before = self.status()
        self.stop_driver()
        self.start()
        self._mark = None
        self.recovered("driver", before)

    def stop_driver(self):
        """Kill the driver and leave it dead."""
        family = psutil.Process(self.driver.pid).children(recursive=True)
        os.kill(self.driver.pid, signal.SIGKILL)
        self.driver.wait(30)
        _, alive = psutil.wait_procs(family, 30)
        assert not alive, f"orphans of a killed driver: {alive}"

    def newest_files(self):
        """The files that the newest manifest needs and the one before it does not; none if nothing changed between
        the two epochs, as on a machine that gave the topology no time."""
        newest = manifests.newest(self.topology_store())
        before = manifests.newest(self.topology_store(), before=newest.epoch)
        return sorted(set(newest.files) - set(before.files))

    def spoil_newest_snapshot(self):
        """Change a byte of one of ``newest_files``; returns the file."""
        path = Path(self.topology_store().url) / self.random.choice(self.newest_files())
        data = bytearray(path.read_bytes())
        data[self.random.randrange(len(data))] ^= 0xFF
        path.write_bytes(data)
        return str(path)

    def topology_store(self):
        return StateStore(self.config["settings"]["state_dir"]).child(self.name)

    # ---- results ---------------------------------------------------------------------------------------

    def rows(self):
        """⟨origin, n⟩ of all rows in the output, with the number of times."""
        files = glob.glob(f"{self.config['output']}/*.parquet")
        if not files:
            return Counter()
        table = ds.dataset(files, format="parquet").to_table(columns=["origin", "n"])
        return Counter(zip(table["origin"].to_pylist(), table["n"].to_pylist(), strict=True))

    def wanted(self):
        return Counter({(origin, n): 1 for origin in (0, 1) for n in range(self.count)})

    def finish(self):
        """Wait until all input is in the output, end, and compare."""
        wanted = self.wanted()
        looked = [0.0]

        def complete():
            if time.monotonic() - looked[0] < 0.5:
                return False
            looked[0] = time.monotonic()
            return wanted.keys() <= self.rows().keys()

        self.await_("all input to be in the output", complete)
        self.stop()
        rows, counts = self.rows(), self.counts()
        oracle = Counter(f"key-{n % 50}" for _, n in wanted)
        if self.delivery == "exactly_once":
            doubled = [row for row, times in rows.items() if times > 1]
            assert not doubled, f"{len(doubled)} rows twice, such as {doubled[:5]}\n{self.story()}"
            assert rows == wanted, self.story()
            assert counts == oracle, self.story()
        else:
            assert rows.keys() == wanted.keys(), self.story()
            assert all(counts[key] >= oracle[key] for key in oracle), self.story()

    def counts(self, store=None):
        """The counts in the state of the last committed epoch, or in that of a savepoint, whatever number of tasks
        they are spread over."""
        total = Counter()
        for state in self.states("count", store).values():
            counts = dict(state.map("counts", 0))
            assert not counts.keys() & total.keys(), f"every key has one owner\n{self.story()}"
            total.update(counts)
        return total

    def states(self, component, store=None):
        """The state of each task of a component, by ``component/index``."""
        store = store or self.topology_store()
        found = {}
        for key, parts in read_parts(store, manifests.newest(store).chains).items():
            if key.startswith(f"{component}/"):
                found[key] = TaskState()
                found[key].restore(parts)
        return found
