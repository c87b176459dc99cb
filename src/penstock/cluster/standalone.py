"""Command lines and settings for Spark's standalone master and workers, from the jars that come with pyspark, and
the master's view of its workers."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path

from penstock.cluster.record import ClusterNode, ClusterRecord
from penstock.errors import EnvironmentFault
from penstock.metrics.machine import NODE_CPUS

# Masters and workers only start and monitor executors: little memory and a fast start suffice.
_JAVA_OPTIONS = ("-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-Xmx256m")
_MASTER = "org.apache.spark.deploy.master.Master"
_WORKER = "org.apache.spark.deploy.worker.Worker"
_SETTINGS: Mapping[str, str] = {
    "spark.authenticate": "true",
    # On SIGPWR a worker accepts nothing new, and its executors end when they are idle.
    "spark.decommission.enabled": "true",
    # The web pages are read-only, because they do not authenticate.
    "spark.ui.killEnabled": "false",
    "spark.master.ui.decommission.allow.mode": "DENY",
    "spark.master.rest.enabled": "false",
    # Limits the disk space of executors' output, which is rarely read.
    "spark.executor.logs.rolling.strategy": "size",
    "spark.executor.logs.rolling.maxSize": "4194304",
    "spark.executor.logs.rolling.maxRetainedFiles": "2",
}
_NOT_KEPT = ("SPARK_", "PYSPARK_", NODE_CPUS)
_ANSWER_SECONDS = 2.0  # time limit for the master's page; it answers in milliseconds unless overloaded


def spark_home() -> Path:
    """The folder of the installed pyspark, found without importing it."""
    found = importlib.util.find_spec("pyspark")
    if found is None or found.origin is None:
        raise EnvironmentFault(
            "Spark", "the package pyspark is not installed", "Install it with: pip install penstock."
        )
    return Path(found.origin).parent


def environment(java_home: str, host: str, work: Path, cpus: float | None = None) -> dict[str, str]:
    """The environment for a master or a worker and the executors it starts, without the user's Spark variables.
    ``cpus``: the CPU limit of the node. A process in a network namespace cannot read it from its control group."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_NOT_KEPT)}
    home = spark_home()
    return {
        **kept,
        "JAVA_HOME": java_home,
        "SPARK_HOME": str(home),
        "SPARK_SCALA_VERSION": _scala_version(home),  # without it a worker searches for Spark's build folders
        "SPARK_LOCAL_IP": host,
        "SPARK_LOCAL_DIRS": str(work / "local"),
        **({NODE_CPUS: f"{cpus:g}"} if cpus is not None else {}),
    }


def settings_text(secret: str) -> str:
    """The settings file for masters and workers. On a command line every user could read the secret."""
    settings = {**_SETTINGS, "spark.authenticate.secret": secret}
    return "".join(f"{key} {value}\n" for key, value in settings.items())


def master_command(record: ClusterRecord, java_home: str, settings: Path) -> list[str]:
    where = ["--host", record.host, "--port", str(record.port), "--webui-port", str(record.web_port)]
    return [*_java(java_home), _MASTER, *where, "--properties-file", str(settings)]


def worker_command(
    record: ClusterRecord, node: ClusterNode, java_home: str, settings: Path, work: Path
) -> list[str]:
    where = ["--host", node.host, "--port", str(node.port), "--webui-port", "0"]
    offers = ["--cores", str(record.slots), "--memory", record.memory, "--work-dir", str(work)]
    return [*_java(java_home), _WORKER, *where, *offers, "--properties-file", str(settings), record.url]


def workers(record: ClusterRecord) -> dict[tuple[str, int], str]:
    """The state of each worker by address, as the master reports it: ``ALIVE``, ``DECOMMISSIONED`` or ``DEAD``.
    Empty if the master does not answer."""
    try:
        with urllib.request.urlopen(
            f"http://{record.host}:{record.web_port}/json/", timeout=_ANSWER_SECONDS
        ) as page:
            found = json.load(page)["workers"]
    except (OSError, ValueError, KeyError, urllib.error.URLError):
        return {}
    return {(worker["host"], int(worker["port"])): str(worker["state"]) for worker in found}


def _java(home: str) -> list[str]:
    return [str(Path(home) / "bin" / "java"), *_JAVA_OPTIONS, "-cp", f"{spark_home() / 'jars'}/*"]


def _scala_version(home: Path) -> str:
    for jar in (home / "jars").glob("spark-core_*.jar"):
        found = re.match(r"spark-core_([\d.]+)-", jar.name)
        if found:
            return found[1]
    raise EnvironmentFault(
        f"{home}",
        "Spark's jars are missing: there is no spark-core",
        "Install them with: pip install --force-reinstall pyspark.",
    )
