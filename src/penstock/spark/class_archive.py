"""An archive of Spark's classes (JVM class data sharing): a start loads them ready-made instead of parsing and
verifying them, which took about a third off a cold start.

``penstock prepare`` makes it once per environment, next to the installed packages. Without it, or when Java or
Spark has changed since, everything works as before, only slower.
"""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path

import pyspark

from penstock.spark.ports import JAR

_MAKE = "PENSTOCK_MAKE_CLASS_ARCHIVE"


def archive_path() -> Path:
    """Where the archive for this Java, this Spark and our own jar lies. The jar is part of the class path, which
    must be that of the archive."""
    ours = f"{JAR} {hashlib.sha256(JAR.read_bytes()).hexdigest()}"
    key = f"{pyspark.__version__} {pyspark.__file__} {os.environ.get('JAVA_HOME', '')} {ours}"
    return Path(sys.prefix) / "share" / "penstock" / f"spark-{hashlib.sha256(key.encode()).hexdigest()[:12]}.jsa"


def java_options() -> str:
    """Options for the driver's JVM: use the archive, or make it while ``penstock prepare`` runs."""
    path = archive_path()
    quiet = "-Xlog:cds=off -Xlog:cds+dynamic=off -Xlog:class+path=off"
    if new := os.environ.get(_MAKE):
        return f'"-XX:ArchiveClassesAtExit={new}" {quiet}'
    return f'"-XX:SharedArchiveFile={path}" -Xshare:auto {quiet}' if path.is_file() else ""


def make_archive() -> Path:
    """Run a small topology in a JVM that archives the classes it loaded; minutes on a slow machine. The archive
    that is there stays until the new one is whole. Interrupted, it ends Spark at once and leaves nothing."""
    from penstock.spark.java import ensure_java
    from penstock.spark.session import abandon_session, close_session
    from penstock.spark.submit import submit
    from penstock.testing import CaptureBolt, NumberSpout
    from penstock.topology.builder import TopologyBuilder

    ensure_java()
    path = archive_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f"{path.name}.{os.getpid()}")
    os.environ[_MAKE] = str(new)
    try:
        builder = TopologyBuilder()
        builder.set_spout("numbers", NumberSpout(1000))
        builder.set_bolt("first", CaptureBolt(), 2).fields_grouping("numbers", "n")
        submit(builder.build("prepare")).kill()
        close_session(patience=300)
        if new.is_file():
            new.replace(path)
    except BaseException:
        abandon_session()
        raise
    finally:
        del os.environ[_MAKE]
        new.unlink(missing_ok=True)
    return path
