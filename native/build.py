"""Compiles native/native.c to penstock._native, beside the package's sources. Run by ``make setup``, and by
hatch_build.py for wheels.

It needs a C compiler and Python's header files. Without them Penstock runs in pure Python, more slowly.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "native" / "native.c"
PACKAGE = ROOT / "src" / "penstock"


class CannotBuild(Exception):
    """The extension cannot be built here. The text says why."""


def source_hash() -> str:
    """Names the source from which the extension was built; a test compares it with the source."""
    return hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]


def extension_name() -> str:
    """The file name, which contains the version of Python and the architecture: another one does not find it."""
    return f"_native{sysconfig.get_config_var('EXT_SUFFIX')}"


def build(folder: Path = PACKAGE) -> Path:
    """Compile the extension into ``folder`` and return its path. Raises ``CannotBuild``."""
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        raise CannotBuild("this Python is free-threaded, which is not supported")
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not header.exists():
        raise CannotBuild(f"{header} does not exist (on Debian: apt-get install python3-dev)")
    compiler = os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc"
    flags = shlex.split(sysconfig.get_config_var("CCSHARED") or "-fPIC")
    shared = ["-bundle", "-undefined", "dynamic_lookup"] if sys.platform == "darwin" else ["-shared"]
    target = folder / extension_name()
    # Compiled to another name and renamed: a process may have the old file mapped.
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        made = Path(scratch) / target.name
        command = [
            *(*shlex.split(compiler), "-O2", "-fno-strict-aliasing", "-Wall", *flags, *shared),
            *(f"-I{header.parent}", f'-DPENSTOCK_SOURCE="{source_hash()}"', str(SOURCE), "-o", str(made)),
        ]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except OSError as error:
            raise CannotBuild(f"the C compiler '{compiler}' cannot be run: {error.strerror}") from error
        if done.returncode:
            lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
            raise CannotBuild(
                f"the C compiler failed: {next((each for each in lines if 'error' in each), lines[0])}"
            )
        os.replace(made, target)
    return target


if __name__ == "__main__":
    try:
        print(f"built {build().relative_to(ROOT)}", file=sys.stderr)
    except CannotBuild as error:
        print(f"penstock._native is not built, so tuples are handled in pure Python: {error}", file=sys.stderr)
