"""The events of a campaign. Each function takes the run, the event and its record in the report, and returns a
short description of what it did. It raises ``Skipped`` if there was no target."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import time

import psutil

from penstock.cli import savepoint as savepoint_command
from penstock.errors import PenstockError
from penstock.protocol.requests import OperatorRequest

_ANSWER = 120.0  # seconds within which a command must be answered, whatever happens to the topology
_SECOND_DRIVER = 130.0  # seconds for a second driver to run or to end


class Skipped(Exception):
    """The event did not take place."""


# ---- processes -----------------------------------------------------------------------------------------


def kill_worker(run, event, record):
    return _kill(run.victims(_workers, "worker", event.pick))


def stop_worker(run, event, record):
    return _stop(run, [run.victims(_workers, "worker", event.pick)], event)


def kill_executor(run, event, record):
    return _kill(run.victims(_executors, "executor", event.pick))


def stop_executor(run, event, record):
    return _stop(run, [run.victims(_executors, "executor", event.pick)], event)


def kill_jvm(run, event, record):
    """The driver's own: the driver cannot go on without it, and is started again."""
    pid = run.victims(lambda status: status.get("jvms", []), "JVM", event.pick)
    run.driver.excuse = "its JVM was killed"
    return _kill(pid)


def kill_driver(run, event, record):
    """Another is started at once, while what the dead one started may still live."""
    run.driver.excuse = "it was killed"
    os.kill(run.driver.pid, signal.SIGKILL)
    run.driver.process.wait(30)
    return f"{run.driver}, {_since_start(run)}"


def stop_driver(run, event, record):
    pids = [run.driver.pid] if event.form == "alone" else run.driver.family()
    return _stop(run, pids, event)


def second_driver(run, event, record):
    """Of the same topology. It takes over, while the first runs or is stopped, or is refused."""
    first = run.driver
    if not run.until(lambda: first.active or first.ended, _SECOND_DRIVER) or first.ended:
        raise Skipped("no driver runs beside which it could be started")
    if event.form == "refused":
        return _refused_driver(run, first)
    stopped = {"running": [], "stopped": [first.pid], "all stopped": first.family()}[event.form]
    first.excuse = "another took over"
    began, other = time.monotonic(), run.launch(take_over=True)
    try:
        _signal(stopped, signal.SIGSTOP)
        ready = run.until(lambda: other.active or run.driver is not other, _SECOND_DRIVER)
    finally:
        _signal(stopped, signal.SIGCONT)
    how = "active" if ready and other.active else "not active"
    return f"{other} beside {first}, {how} after {time.monotonic() - began:.1f} s"


def _refused_driver(run, first):
    """Without being told to take over, it must end and leave the first alone."""
    other = run.launch()
    run.driver = first  # the first is still the one that is to run
    run.drivers.remove(other)
    run.drivers.insert(-1, other)
    other.excuse = "another runs"
    ended = run.until(lambda: other.ended or other.active, _SECOND_DRIVER)
    if not ended or other.process.poll() is None:
        run.complaints.append(f"{other} was not refused beside {first}")
        with contextlib.suppress(ProcessLookupError):
            os.kill(other.pid, signal.SIGKILL)
    return f"{other} beside {first}: {other.tail().strip().splitlines()[-1:]}"


def _workers(status):
    return status.get("workers", {}).values()


def _executors(status):
    return status.get("executors", [])


def _since_start(run):
    return f"state {run.status().get('state', 'starting')}"


def _kill(pid):
    os.kill(pid, signal.SIGKILL)
    return f"process {pid}"


def _stop(run, pids, event):
    _signal(pids, signal.SIGSTOP)
    run.later(event.seconds, f"continue {pids}", lambda: _signal(pids, signal.SIGCONT))
    return f"{len(pids)} processes, such as {pids[0]}"


def _signal(pids, signum):
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signum)


# ---- servers and disks ---------------------------------------------------------------------------------


def kill_broker(run, event, record):
    return _kill_server(run, "kafka", event)


def stop_broker(run, event, record):
    return _stop(run, [_up(run, "kafka").pid], event)


def kill_store(run, event, record):
    return _kill_server(run, "postgres", event)


def stop_store(run, event, record):
    """All its processes: its connections stay, and nobody answers."""
    postmaster = _up(run, "postgres")
    return _stop(run, [postmaster.pid, *(child.pid for child in postmaster.children())], event)


def _kill_server(run, name, event):
    """It comes back on the same port, with the data that it had made durable."""
    server, lock = run.servers[name], run.locks[name]

    def start():
        with lock:
            server.start()

    with lock:  # not while it is being started
        _up(run, name)
        server.kill()
    run.later(event.seconds, f"start {name}", lambda: run.aside(f"start {name}", start))
    return ""


def _up(run, name):
    """The server's process."""
    server = run.servers[name]
    process = server._process._process if name == "kafka" else server._server
    if process is None:
        raise Skipped("it is down already")
    return psutil.Process(process.pid)


def fill_state_disk(run, event, record):
    return _fill(run, "state", event)


def fill_sink_disk(run, event, record):
    return _fill(run, "sink", event)


def _fill(run, name, event):
    """With a file that takes all there is; what others free meanwhile it does not take."""
    if name not in run.disks:
        raise Skipped("no small disk: needs the right to mount")
    ballast = run.disks[name] / "ballast"
    if ballast.exists():
        raise Skipped("it is full already")
    written = 0
    with contextlib.suppress(OSError), ballast.open("ab", buffering=0) as file:
        while written < 1 << 30:
            written += file.write(bytes(65536))
    run.later(event.seconds, f"free the {name} disk", lambda: ballast.unlink(missing_ok=True))
    return f"{written >> 20} MB"


# ---- commands ------------------------------------------------------------------------------------------


def scale(run, event, record):
    component, tasks = event.form.split()
    return _command(run, record, OperatorRequest("scale", {"parallelism": {component: int(tasks)}}))


def replace(run, event, record):
    return _command(run, record, OperatorRequest("replace", {"target": str(len(run.done))}))


def deactivate(run, event, record):
    """And activate again: as often as it takes, since a topology that is being started again refuses."""

    def carry_out():
        driver = run.driver
        if not _ask(run, record, OperatorRequest("deactivate")):
            return
        time.sleep(event.seconds)
        until = time.monotonic() + _ANSWER
        while run.driver is driver and not driver.ended and time.monotonic() < until:
            if _ask(run, record, OperatorRequest("activate")):
                return
            time.sleep(0.5)

    run.aside("deactivate", carry_out)
    return ""


def savepoint(run, event, record):
    target = run.folder / f"savepoint-{len(run.done)}"
    options = argparse.Namespace(
        topology=run.name,
        target=str(target),
        state_dir=run.config["settings"]["state_dir"],
        timeout=_ANSWER,
        at_rest=False,
    )

    def carry_out():
        try:
            savepoint_command.handle(options)
            run.savepoints.append(str(target))
            _tell(run, record, "savepoint done")
        except PenstockError as error:
            _tell(run, record, f"savepoint not done: {error}")

    run.aside("savepoint", carry_out)
    return ""


def _command(run, record, command):
    run.aside(command.name, lambda: _ask(run, record, command))
    return ""


def _tell(run, record, what):
    """What became of a command that was given some time ago."""
    record["told"] += f" {what};"
    run.say(f"            {record['event']:2}. {what[:200]}")


def _ask(run, record, command):
    """True: carried out. What is refused is told in the record: a topology that is being started again may."""
    found = run.find_run()
    if found is None:
        _tell(run, record, f"{command.name}: no topology to ask")
        return False
    began = time.monotonic()
    try:
        found.ask(command, _ANSWER)
        _tell(run, record, f"{command.name} done in {time.monotonic() - began:.1f} s")
        return True
    except PenstockError as error:
        if time.monotonic() - began > _ANSWER - 1:
            run.complaints.append(f"{command.name} was not answered within {_ANSWER:.0f} s")
        _tell(run, record, f"{command.name} refused: {error}")
        return False


EVENTS = {
    "kill worker": kill_worker,
    "stop worker": stop_worker,
    "kill executor": kill_executor,
    "stop executor": stop_executor,
    "kill JVM": kill_jvm,
    "kill driver": kill_driver,
    "stop driver": stop_driver,
    "second driver": second_driver,
    "kill broker": kill_broker,
    "stop broker": stop_broker,
    "kill store": kill_store,
    "stop store": stop_store,
    "fill state disk": fill_state_disk,
    "fill sink disk": fill_sink_disk,
    "scale": scale,
    "replace": replace,
    "savepoint": savepoint,
    "deactivate": deactivate,
}
