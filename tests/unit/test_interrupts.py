"""Every command handles SIGINT, SIGTERM and SIGHUP in the same way, regardless of inherited settings."""

import signal
import subprocess
import sys

import pytest

from penstock.interrupts import Interrupted

_SLOW_FILE = """
import sys, time
print("here", flush=True)
time.sleep(60)
"""


def _ignore(*numbers):
    """Ignore exactly these signals, also if the test runs under nohup."""

    def set_ignored():
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN if number in numbers else signal.SIG_DFL)

    return set_ignored


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_command_is_stopped_though_it_inherited_ignored_signals(tmp_path, number):
    path = tmp_path / "slow.py"
    path.write_text(_SLOW_FILE)
    ignored = [signal.SIGINT, signal.SIGTERM] if number != signal.SIGHUP else []
    process = _plan(path, ignored)
    process.send_signal(number)
    _, error = process.communicate(timeout=30)
    assert (process.returncode, error) == (128 + number, "penstock: stopped\n")


def test_nohup_keeps_its_meaning(tmp_path):
    path = tmp_path / "slow.py"
    path.write_text(_SLOW_FILE)
    process = _plan(path, [signal.SIGHUP])
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGTERM


def test_a_signal_that_does_not_interrupt_the_main_threads_call_is_heard(tmp_path):
    """Like a signal that arrives just before the call, which a test cannot time: here another thread receives
    it."""
    path = tmp_path / "slow.py"
    path.write_text("""
import signal, sys, threading, time
print("here", flush=True)
sleeper = threading.Thread(target=time.sleep, args=(60,), daemon=True)
sleeper.start()
threading.Timer(0.5, signal.pthread_kill, (sleeper.ident, signal.SIGTERM)).start()
time.sleep(60)
""")
    process = _plan(path, [])
    _, error = process.communicate(timeout=30)
    assert (process.returncode, error) == (128 + signal.SIGTERM, "penstock: stopped\n")


@pytest.mark.parametrize("last", ["atexit", "thread"])
def test_a_signal_behind_the_commands_end_does_not_change_its_exit_code(tmp_path, last):
    """A thread or exit handler of the user may hang: a signal ends the process, with the exit code of the
    command."""
    path = tmp_path / "slow.py"
    begin = {
        "atexit": "import atexit; atexit.register(wait)",
        "thread": "import threading; threading.Thread(target=wait).start()",
    }[last]
    path.write_text(f"""
import sys, threading, time
print("here", flush=True)
def wait():
    while threading.main_thread().is_alive() and {last == "thread"}:
        time.sleep(0.01)
    print("behind", flush=True)
    time.sleep(60)
{begin}
""")
    process = _plan(path, [])
    assert process.stdout.readline() == "behind\n"
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=30)
    assert process.returncode == 2, error  # the file contains no topology
    assert "Traceback" not in error


def test_the_exit_code_is_the_shells():
    assert Interrupted(signal.SIGINT).exit_code == 130


def _plan(path, ignored):
    process = subprocess.Popen(
        [sys.executable, "-m", "penstock.cli.main", "plan", str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=_ignore(*ignored),
    )
    assert process.stdout.readline() == "here\n"
    return process
