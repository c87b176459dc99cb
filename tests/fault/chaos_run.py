"""Carries out a campaign: keeps a driver running, as an operator would, applies the events, and at the end
compares the sink's content with the input."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil

from penstock.driver import discovery
from penstock.errors import PenstockError
from penstock.state.store import StateStore
from tests.fault.chaos_events import EVENTS, Skipped
from tests.fault.harness import ROOT, Run, has_mark, marked, started_by
from tests.fault.oracle import ORIGINS, Verdict, judge, judge_savepoint

HARD_LIMIT = 480.0  # seconds for a whole campaign; one takes about 80 on two cores
PROGRESS = 150.0  # seconds within which something new must be committed after any event; a driver starts in ten
_SETTLING = 150.0  # seconds for all input to be processed after the last event
_ENDING = 60.0  # seconds for a driver and its child processes to end
_STARTS = 8  # failed starts of drivers in a row, after which the campaign fails
_RATE = 300  # records per second, so that the input outlasts the events
_ROWS = 30_000  # records of each origin
_TAIL = 6_000  # characters of a log in the report of a failure
_LOGS = Path("results/chaos-logs")


class Failed(AssertionError):
    """The campaign did not complete."""


class Driver:
    """One process of the driver of the fault tests, with a status and a log of its own."""

    def __init__(self, folder, number, config):
        self.number, self._mark = number, f"{folder}/{number}"
        self.log = folder / f"driver-{number}.log"
        self._status = folder / f"status-{number}.json"
        path = folder / f"config-{number}.json"
        path.write_text(json.dumps({**config, "status": str(self._status)}))
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.fault.driver", str(path)],
                cwd=ROOT,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=marked(self._mark),
                start_new_session=True,
            )
        self._read = (0.0, {})
        self.excuse = ""
        """Why it may end before it is told to."""
        self.ran = False

    def __str__(self):
        return f"driver {self.number} (process {self.process.pid})"

    @property
    def pid(self):
        return self.process.pid

    @property
    def ended(self):
        return self.process.poll() is not None

    def status(self):
        """What it said last."""
        try:
            changed = self._status.stat().st_mtime_ns
            if changed != self._read[0]:
                self._read = (changed, json.loads(self._status.read_text()))
        except (OSError, ValueError):
            pass
        return self._read[1]

    @property
    def active(self):
        running = self.status().get("state") in ("active", "inactive")
        self.ran = self.ran or running
        return running and not self.ended

    def family(self):
        """All its processes that live, also those that it left behind."""
        return started_by(self._mark)

    def owns(self, pid):
        return has_mark(pid, self._mark)

    def run(self):
        """As commands find it; None while it cannot be found."""
        return next((run for run in discovery.running() if run.pid == self.pid), None)

    def tail(self):
        return self.log.read_text(errors="replace")[-_TAIL:]


class ChaosRun(Run):
    """One campaign. ``servers`` has a ``KafkaServer`` as ``kafka`` and a ``PostgresServer`` as ``postgres``, where
    it needs them; ``disks`` has small disks that can be filled, as ``state`` and ``sink``."""

    def __init__(self, folder, campaign, servers, disks, rows=_ROWS, **settings):
        self.campaign, self.servers, self.disks = campaign, servers, disks
        self.name = f"chaos-{campaign.seed}"
        if "state" in disks:
            settings["state_dir"] = str(disks["state"] / "state")
        quick = {"heartbeat_timeout": 6.0, "message_timeout": 10.0, "start_timeout": 100.0}
        super().__init__(folder, campaign.seed, campaign.delivery, rows, rate=1_000_000, **{**quick, **settings})
        self.config.update(chaos=self._ends(), max_rate=_RATE, hurry=str(self.folder / "hurry"))
        self.config.update(look=0.2, scan=1.0)  # seconds: two cores are little for two drivers
        if campaign.nodes:
            self.config["master"] = f"local-cluster[{campaign.nodes},24,1024]"
        if campaign.sink == "parquet" and "sink" in disks:
            self.config["output"] = str(disks["sink"] / "output")
        self.driver: Driver | None = None
        self.drivers: list[Driver] = []
        self.done: list[dict] = []
        """The events, as they happened."""
        self.complaints: list[str] = []
        """What should not have happened, other than to the data."""
        self.verdict = Verdict(notes=["not judged"])
        self.judged = False
        self.savepoints: list[str] = []
        self.output = None
        self._later: list[tuple[float, str, object]] = []
        self._threads: list[threading.Thread] = []
        self._in_vain, self._start_at, self._newest = 0, 0.0, 0
        self.locks = {name: threading.Lock() for name in servers}
        """Held while a server is started."""
        self._began, self.took = time.monotonic(), 0.0
        self.deadline = self._began + HARD_LIMIT

    def _ends(self):
        campaign, seed = self.campaign, self.campaign.seed
        ends = {"source": campaign.source, "sink": campaign.sink, "files": str(self.folder / "input")}
        if campaign.has("kafka"):
            ends |= {"topic_in": f"in-{seed}", "topic_out": f"out-{seed}"}
            ends["bootstrap"] = self.servers["kafka"].bootstrap
        if campaign.has("postgres"):
            ends |= {"dsn": self.servers["postgres"].dsn, "table": f"chaos_{seed}"}
        return ends

    # ---- the campaign ----------------------------------------------------------------------------------

    def play(self):
        """From the start to the verdict. Raises ``Failed`` where it does not come to one."""
        self.say(str(self.campaign))
        try:
            self.launch()
            self.must("the topology to run", lambda: self.driver.active, PROGRESS)
            for number, event in enumerate(self.campaign.events, 1):
                self.await_progress(before=event)
                self.until(lambda: False, event.pause)
                self._let_happen(number, event)
            self._settle()
        except Failed as failure:
            self.complaints.append(str(failure))
            self._dump()
        except Exception as error:
            self.complaints.append(f"{type(error).__name__}: {error}")
            self._dump()
            raise
        finally:
            self.took = time.monotonic() - self._began
            self.say(self.line())

    def _let_happen(self, number, event):
        record = {"event": number, "what": str(event), "kind": event.kind, "at": self._at(), "told": ""}
        self.done.append(record)
        try:
            told = EVENTS[event.kind](self, event, record)
            record["told"] = told + record["told"]  # a command may have been answered already
        except Skipped as why:
            record["skipped"] = str(why)
        except psutil.NoSuchProcess as gone:
            record["skipped"] = f"the process was gone: {gone}"
        told = f"skipped: {record['skipped']}" if "skipped" in record else record["told"]
        self.say(f"  {record['at']:6.1f} s  {number:2}. {event}: {told}")

    @property
    def happened(self):
        """The number of events that were carried out."""
        return sum("skipped" not in record for record in self.done)

    @property
    def good(self):
        return self.judged and self.verdict.good and not self.complaints

    def line(self):
        """The verdict in a line."""
        verdict = self.verdict
        doubled = f", {verdict.doubled} doubled" if verdict.doubled and not self.campaign.exact else ""
        word = "GOOD" if self.good else "BAD"
        faults = "; ".join([*verdict.notes, *self.complaints]).replace("\n", " ")[:600]
        faults = f" ({faults})" if faults else ""
        return (
            f"{word} {self.campaign}; {self.happened} events in {self.took:.0f} s, {len(self.drivers)} drivers, "
            f"{verdict.rows} rows: {verdict.lost} lost, {verdict.wrong} wrong{doubled}{faults}"
        )

    def report(self):
        campaign = self.campaign
        return {
            "seed": campaign.seed,
            "sink": campaign.sink,
            "source": campaign.source,
            "delivery": campaign.delivery,
            "executors": campaign.nodes,
            "good": self.good,
            "events": self.happened,
            "lost": self.verdict.lost,
            "wrong": self.verdict.wrong,
            "doubled": self.verdict.doubled,
            "rows": self.verdict.rows,
            "drivers": len(self.drivers),
            "savepoints": len(self.savepoints),
            "seconds": round(self.took, 1),
            "faults": [*self.verdict.notes, *self.complaints],
            "happened": self.done,
        }

    def say(self, line):
        print(line, flush=True)

    def _at(self):
        return round(time.monotonic() - self._began, 1)

    # ---- waiting ---------------------------------------------------------------------------------------

    def until(self, condition, limit):
        """Wait for the condition while all goes on that is under way; False: not within ``limit`` seconds. Raises
        ``Failed`` when the campaign's time is up."""
        until = time.monotonic() + limit
        while True:
            self._tick()
            if condition():
                return True
            now = time.monotonic()
            if now > self.deadline:
                raise Failed(f"the campaign took longer than {HARD_LIMIT:.0f} s")
            if now > until:
                return False
            time.sleep(0.1)  # polls, because other processes cannot be waited for

    def must(self, what, condition, limit):
        if not self.until(condition, limit):
            raise Failed(f"at {self._at()} s: waited {limit:.0f} s in vain for {what}")

    def await_progress(self, before):
        """Until something is committed that was not there when the last event happened."""
        if not before.settled:
            return
        goal = self._newest + 2  # one may have been under way
        self.must("a new epoch", lambda: self._newest >= goal, PROGRESS)

    def later(self, seconds, what, undo):
        """Have ``undo`` called after so many seconds, whatever happens meanwhile."""
        self._later.append((time.monotonic() + seconds, what, undo))

    def aside(self, what, action):
        """Do something that takes time, while the campaign goes on."""
        thread = threading.Thread(target=action, name=what, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _tick(self):
        for due in sorted((one for one in self._later if one[0] <= time.monotonic()), key=lambda one: one[0]):
            self._later.remove(due)
            due[2]()
        self._keep_running()

    # ---- drivers ---------------------------------------------------------------------------------------

    def launch(self, **config):
        """Start a driver, which is from now on the one that is to run."""
        self.driver = Driver(self.folder, len(self.drivers), {**self.config, **config})
        self.drivers.append(self.driver)
        return self.driver

    def _keep_running(self):
        """Start another driver when the last one has ended, as an operator would."""
        driver = self.driver
        if driver.active:
            self._in_vain = 0
            self._newest = max(self._newest, driver.status().get("committed", 0))
        if not driver.ended or time.monotonic() < self._start_at:
            return
        if driver.ran and not driver.excuse:
            self.complaints.append(f"at {self._at()} s: {driver} ended by itself: {_last_line(driver.tail())}")
        self._in_vain += 1
        if self._in_vain > _STARTS:
            raise Failed(f"at {self._at()} s: {_STARTS} drivers in a row did not come to run")
        self._start_at = time.monotonic() + 0.5 * self._in_vain
        self.launch(take_over=not all(each.ended for each in self.drivers))

    def status(self):
        return self.driver.status() if self.driver else {}

    def victims(self, pids, what, pick):
        """One of the processes of the driver that ``pids`` finds; waits for there to be one."""
        found = []

        def look():
            found[:] = sorted(pid for pid in pids(self.status()) if self.driver.owns(pid))
            return bool(found)

        if not self.until(look, 40):
            raise Skipped(f"no {what} there for 40 s")
        return found[int(pick * len(found))]

    def find_run(self, limit=20):
        """The running topology, as commands find it."""
        until = time.monotonic() + limit
        while time.monotonic() < until:
            run = self.driver.run()
            if run is not None:
                return run
            time.sleep(0.2)  # polls, because another process cannot be waited for
        return None

    # ---- the end ---------------------------------------------------------------------------------------

    def _settle(self):
        """When nothing happens any more: all input comes through, all but one driver end, then that one too."""
        self.must("what was begun to end", lambda: not self._later, 30)
        self.must("commands to be answered", lambda: not any(map(threading.Thread.is_alive, self._threads)), 130)
        Path(self.config["hurry"]).touch()
        looked = [0.0]

        def complete():
            if time.monotonic() - looked[0] < 1.0 or not self.driver.active:
                return False
            looked[0] = time.monotonic()
            return len({row[:2] for row in self.output.rows()}) >= len(ORIGINS) * self.count

        if not self.until(complete, _SETTLING):
            self.complaints.append(f"not all input is in the output after {_SETTLING:.0f} s")
            self._dump()
        for old in self.drivers[:-1]:
            if not self.until(lambda: old.ended, _ENDING):  # noqa: B023 - waited for within the turn
                self.complaints.append(f"{old} still runs, though another took its place")
        self._end()
        self.verdict = judge(self.campaign.exact, self.count, self.output.rows(), self.counts())
        self.judged = True
        self._judge_savepoints()

    def _end(self):
        """Let the driver end by itself, and all it started with it."""
        Path(self.config["stop"]).touch()
        driver = self.driver
        with contextlib.suppress(subprocess.TimeoutExpired):
            driver.process.wait(_ENDING)
        if driver.process.poll() != 0:
            code = driver.process.poll()
            self.complaints.append(f"{driver} did not end well (exit code {code}): {_last_line(driver.tail())}")
            self._dump()
        until = time.monotonic() + _ENDING
        while orphans := [pid for each in self.drivers if each.ended for pid in each.family()]:
            if time.monotonic() > until:
                self.complaints.append(f"processes of drivers that ended: {list(map(_command, orphans))}")
                return
            time.sleep(0.1)  # polls, because other processes cannot be waited for

    def _judge_savepoints(self):
        for url in self.savepoints:
            store = StateStore(url)
            counts = self.counts(store)  # raises where it cannot be read
            if self.campaign.exact and self.campaign.source == "numbers":
                spouts = self.states("source", store).items()
                positions = {task: state.value("position", 0).value for task, state in spouts}
                if wrong := judge_savepoint(positions, counts):
                    self.verdict.blame([f"{url}: {wrong}"], "savepoints do not hold together")

    def _dump(self):
        """Stacks of what still lives to the logs, and the logs to a folder that stays."""
        for driver in self.drivers:
            for pid in driver.family():
                with contextlib.suppress(OSError, psutil.Error):
                    if "java" in psutil.Process(pid).name():
                        os.kill(pid, signal.SIGQUIT)
                    elif _catches(pid, signal.SIGUSR1):
                        os.kill(pid, signal.SIGUSR1)
        time.sleep(2.0)  # they write to a log that others hold
        _LOGS.mkdir(parents=True, exist_ok=True)
        for driver in self.drivers:
            shutil.copy(driver.log, _LOGS / f"seed-{self.seed}-{driver.log.name}")
            self.say(f"{driver}, status {driver.status()}, log:\n{driver.tail()}")

    def story(self):
        return f"{self.campaign}, status {self.status()}"

    def close(self):
        """Undo what is done, end what runs."""
        for _, _, undo in sorted(self._later, key=lambda one: one[0]):
            with contextlib.suppress(OSError, PenstockError):
                undo()
        self._later.clear()
        for driver in self.drivers:
            for pid in driver.family():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            driver.process.wait(30)
        for thread in self._threads:
            thread.join(60)
        if self.output is not None:
            self.output.close()


def _command(pid):
    try:
        return f"{pid} {' '.join(psutil.Process(pid).cmdline())[:120]}"
    except psutil.Error:
        return f"{pid}, gone"


def _catches(pid, signum):
    """The process handles the signal: it would end another."""
    status = Path(f"/proc/{pid}/status").read_text()
    caught = next(line for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught.split()[1], 16) >> (signum - 1) & 1)


def _last_line(text):
    """The last error of ours, or the last line."""
    lines = [line for line in text.strip().splitlines() if line.strip()] or ["nothing in its log"]
    errors = [
        line for line in lines if line.startswith("penstock.")
    ]  # how Python ends the stack of an error of ours
    return (errors or lines)[-1][:400]
