"""A test that hangs fails after its time limit, with the stacks of all threads, and the next one runs."""

import subprocess
import sys
from pathlib import Path

_ROOT = Path(__file__).parents[2]
_TESTS = """
import threading
from pathlib import Path

def sleeper():
    threading.Event().wait()

def test_that_hangs():
    threading.Thread(target=sleeper, daemon=True).start()
    threading.Event().wait()

def test_after_it():
    pass
"""


def test_every_test_has_a_limit(request):
    assert float(request.config.getini("timeout")) == 120
    assert request.config.getini("timeout_method") == "signal"


def test_a_test_that_hangs_fails_with_all_stacks(tmp_path):
    (tmp_path / "test_hanging.py").write_text(_TESTS)
    settings = ["-c", str(_ROOT / "pyproject.toml"), "--rootdir", str(tmp_path), "-o", "timeout=1"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *settings, "-p", "no:cacheprovider", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    said = done.stdout + done.stderr
    assert "1 failed, 1 passed" in said
    assert "Timeout (>1.0s)" in said
    assert "in sleeper" in said, "the other thread's stack is missing"
