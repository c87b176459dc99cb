"""Ctrl-C and SIGTERM at various times of ``penstock run``: no traceback, and nothing is left behind."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

import pytest

_COMMAND = [sys.executable, "-c", "import sys; from penstock_command import main; sys.exit(main())"]
_EXAMPLE = Path(__file__).parents[2] / "examples" / "word_count.py"
_MARK = "PENSTOCK_TEST_RUN"
_PATIENCE = 90.0  # seconds for an orderly end on two busy cores
_GONE = 15.0  # seconds for what ends by itself when its parent is gone

_MOMENTS = (0.0, 0.3, 0.8, 1.5, 2.2, 3.0, 4.0, 5.0, 7.0, 10.0)  # seconds; a start takes about five
_SIGNALS = ("SIGINT", "SIGTERM", "SIGINT twice", "SIGTERM twice")


@pytest.mark.forms(
    short=[("SIGINT", 0.0), ("SIGTERM", 1.0), ("SIGINT twice", 3.0)],
    full=[(how, moment) for how in _SIGNALS for moment in _MOMENTS],
)
def test_nothing_is_left_behind(form):
    how, moment = form
    mark = f"{_MARK}={uuid.uuid4().hex}"
    folder = Path(tempfile.mkdtemp(prefix="signals-"))  # short: Unix sockets go there
    process = subprocess.Popen(
        [*_COMMAND, "run", "--plain", str(_EXAMPLE)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **dict([mark.split("=")]), "TMPDIR": str(folder)},
    )
    try:
        _await(lambda: _catches(process.pid, signal.SIGTERM), 30)  # from here on it is our code
        assert process.pid in _marked(mark)  # or it would find nothing afterwards either
        time.sleep(moment)  # the moment is what is tested
        number = signal.Signals[how.split()[0]]
        process.send_signal(number)
        if "twice" in how:
            time.sleep(0.4)
            process.send_signal(number)
        _, error = process.communicate(timeout=_PATIENCE)
        assert "Traceback" not in error
        assert "Exception" not in error
        assert process.returncode in (0, 128 + number), error
        if process.returncode:
            assert error.startswith("penstock: "), error
        _await(lambda: not _marked(mark), _GONE, lambda: [_command_line(pid) for pid in _marked(mark)])
        assert os.listdir(folder) == []
    finally:
        for pid in _marked(mark):  # of a test that failed
            os.kill(pid, signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)


def _await(condition, seconds, what=lambda: ""):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what()
        time.sleep(0.01)


def _catches(pid, number):
    (caught,) = (
        line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("SigCgt")
    )
    return bool(int(caught.split()[1], 16) >> (number - 1) & 1)


def _marked(mark):
    """The living processes whose environment has the mark: all that the command started inherit it."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                if mark.encode() in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def _command_line(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")[:200]
    except OSError:
        return b""
