"""Builds src/penstock/spark/penstock-shuffle.jar from java/src. Run by ``make jar``; needs a JDK (javac).

The same sources and the same javac give the same bytes: entries are sorted and have a fixed date. The jar says
from which sources and by which javac it was made; a test compares that with the sources.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ROOT / "java" / "src"
JAR = ROOT / "src" / "penstock" / "spark" / "penstock-shuffle.jar"
RELEASE = "17"  # the oldest Java that Spark runs on
_DATE = (2026, 1, 1, 0, 0, 0)


def source_hash() -> str:
    """A hash of all sources, in the order of their names."""
    digest = hashlib.sha256()
    for path in sorted(SOURCES.rglob("*.java")):
        digest.update(path.relative_to(SOURCES).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def javac_version() -> str:
    return subprocess.run(["javac", "-version"], capture_output=True, text=True, check=True).stdout.strip()


def compiled() -> dict[str, bytes]:
    """The class files by their names in the jar."""
    import pyspark

    jars = Path(pyspark.__file__).parent / "jars"
    with tempfile.TemporaryDirectory() as folder:
        sources = [str(path) for path in sorted(SOURCES.rglob("*.java"))]
        command = ["javac", "--release", RELEASE, "-g", "-proc:none", "-nowarn", "-cp", f"{jars}/*", "-d", folder]
        subprocess.run([*command, *sources], check=True)
        made = sorted(Path(folder).rglob("*.class"))
        return {path.relative_to(folder).as_posix(): path.read_bytes() for path in made}


def build(jar: Path = JAR) -> None:
    manifest = (
        "Manifest-Version: 1.0\r\n"
        f"Penstock-Compiler: {javac_version()}\r\n"
        f"Penstock-Source: {source_hash()[:48]}\r\n\r\n"  # a line has at most 72 bytes
    )
    with zipfile.ZipFile(jar, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in {"META-INF/MANIFEST.MF": manifest.encode(), **compiled()}.items():
            entry = zipfile.ZipInfo(name, _DATE)
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, data)


if __name__ == "__main__":
    build()
    print(f"{JAR.relative_to(ROOT)}: {JAR.stat().st_size:,} bytes", file=sys.stderr)
