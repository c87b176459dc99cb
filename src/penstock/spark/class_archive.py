"""An archive of Spark's classes (JVM class data sharing), which ``penstock prepare`` makes once per environment.
It shortens a cold start by about a third, because the JVM need not parse and verify the classes.

Without an archive, or after Java or Spark has changed, Spark starts as usual, only slower.
"""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path

import pyspark

from penstock.spark.ports import JAR

_MAKE = "PENSTOCK_MAKE_CLASS_ARCHIVE"
"""Environment variable with the path of the archive to make; set while ``make_archive`` runs."""


def archive_path() -> Path:
    """Return the path of the archive for this Java, this Spark and Penstock's jar. The jar counts because an
    archive is only valid for the class path it was made with."""
    jar = f"{JAR} {hashlib.sha256(JAR.read_bytes()).hexdigest()}"
    key = f"{pyspark.__version__} {pyspark.__file__} {os.environ.get('JAVA_HOME', '')} {jar}"
    return Path(sys.prefix) / "share" / "penstock" / f"spark-{hashlib.sha256(key.encode()).hexdigest()[:12]}.jsa"


def java_options() -> str:
    """Return the options that make the driver's JVM use the archive, or create it while ``penstock prepare``
    runs."""
    path = archive_path()
    quiet = "-Xlog:cds=off -Xlog:cds+dynamic=off -Xlog:class+path=off"
    if new := os.environ.get(_MAKE):
        return f'"-XX:ArchiveClassesAtExit={new}" {quiet}'
    return f'"-XX:SharedArchiveFile={path}" -Xshare:auto {quiet}' if path.is_file() else ""


def make_archive() -> Path:
    """Run a small topology in a JVM that archives its loaded classes, and return the path of the archive. Takes
    minutes on a slow machine.

    An existing archive stays until the new one is complete. If this call is interrupted, it ends Spark at once and
    removes the unfinished archive. Raises ``JavaMissing`` or ``MasterUnreachable`` if Spark cannot be started.
    """
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
