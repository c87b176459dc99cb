"""Every command takes SIGINT, SIGTERM and SIGHUP the same way, whatever it inherited."""

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
    """These and no others, also where this test runs under nohup."""

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
