"""Starts Python processes that belong to this one."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from typing import Any


def start_module(module: str, first_input: bytes, **options: Any) -> subprocess.Popen[bytes]:
    """Start ``python -m module`` with this process's modules, and write ``first_input`` to its standard input,
    which stays open. Secrets belong there: other users can see arguments, and other programs can see the
    environment.

    The process has a session of its own, so that Ctrl-C does not reach it: it ends when its standard input does.
    ``-P`` keeps the working directory, where anyone may have put modules, out of the module path. ``options`` are
    those of ``Popen``."""
    path = [os.path.abspath(entry) for entry in sys.path if entry]
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", module],
        stdin=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
        start_new_session=True,
        **options,
    )
    assert process.stdin is not None
    with contextlib.suppress(OSError):  # the process may have died already
        process.stdin.write(first_input)
        process.stdin.flush()
    return process
