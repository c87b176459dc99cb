"""The JVM of Spark's driver. We start it ourselves, and not through PySpark, so that it is known from its first
moment and can be ended at any: also while it starts, from any thread.

It runs in a session of its own. A Ctrl-C in the terminal therefore reaches only the driver, and every process that
the JVM starts (executors of ``local-cluster``, Python workers) can be found by its session.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from py4j.clientserver import ClientServer
from pyspark import SparkConf
from pyspark.find_spark_home import _find_spark_home
from pyspark.java_gateway import launch_gateway
from pyspark.serializers import UTF8Deserializer, read_int

from penstock.errors import MasterUnreachable
from penstock.spark.safe_path import SAFE_PATH

_POLL = 0.02  # seconds between two looks at a JVM that starts or ends
_ASKED = 3.0  # seconds for a JVM that was asked to end: it removes its temporary files
_PORT, _SECRET = "PYSPARK_GATEWAY_PORT", "PYSPARK_GATEWAY_SECRET"


class Jvm:
    """Of one process; there is one at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._wanted = True

    @property
    def process(self) -> subprocess.Popen[bytes]:
        assert self._process is not None
        return self._process

    @property
    def pid(self) -> int | None:
        """None where there is none: a session may have been opened by others."""
        return None if self._process is None else self._process.pid

    @property
    def wanted(self) -> bool:
        """False once it was abandoned or killed: what it says from then on is of no interest."""
        return self._wanted

    def launch(self, settings: SparkConf, within: Path) -> Path:
        """Start it with these settings; returns the file, in this folder, where it will say how to reach it."""
        folder = Path(tempfile.mkdtemp(prefix="gateway-", dir=within))
        command = [os.path.join(_find_spark_home(), "bin", "spark-submit")]
        for key, value in settings.getAll():
            command += ["--conf", f"{key}={value}"]
        environment = {
            **os.environ,
            "SPARK_CONNECT_MODE": "0",
            SAFE_PATH: "1",
            "_PYSPARK_DRIVER_CONN_INFO_PATH": str(folder / "gateway"),
        }
        with self._lock:
            self._raise_if_unwanted()
            self._process = subprocess.Popen(
                [*command, *shlex.split(os.environ.get("PYSPARK_SUBMIT_ARGS", "pyspark-shell"))],
                stdin=subprocess.PIPE,  # its end tells the JVM that this process is gone
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        return folder / "gateway"

    def connect(self, said: Path) -> ClientServer:
        """Wait until it is up. Raises ``ChildProcessError`` where it ended instead."""
        try:
            while not said.is_file():
                if self.process.poll() is not None:
                    self._raise_if_unwanted()
                    raise ChildProcessError("the JVM exited")
                time.sleep(_POLL)
            with open(said, "rb") as info:
                port, secret = read_int(info), UTF8Deserializer().loads(info)
        finally:
            shutil.rmtree(said.parent, ignore_errors=True)
        os.environ.update({_PORT: str(port), _SECRET: secret})  # where PySpark looks for a JVM that runs already
        try:
            return launch_gateway()
        finally:
            del os.environ[_PORT], os.environ[_SECRET]

    def end(self, patience: float) -> None:
        """Let it end by itself, as it does when its standard input ends, and wait; after ``patience`` seconds it
        is killed with all it started. Without one, nothing."""
        process = self._process
        if process is None:
            return
        assert process.stdin is not None
        with contextlib.suppress(OSError):
            process.stdin.close()
        self._await(process, patience)
        self._kill(process)

    def abandon(self) -> None:
        """End it at once, and let no other start: whoever waits for it gets an error. From any thread."""
        with self._lock:
            self._wanted = False
            process = self._process
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        self._await(process, _ASKED)
        self._kill(process)

    def kill(self) -> None:
        """The same without a moment for the JVM to remove its temporary files."""
        with self._lock:
            self._wanted = False
        if self._process is not None:
            self._kill(self._process)

    def _await(self, process: subprocess.Popen[bytes], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while process.poll() is None and self._process is process and time.monotonic() < deadline:
            time.sleep(_POLL)

    def _kill(self, process: subprocess.Popen[bytes]) -> None:
        """Whatever is left of its session. Its process id names the session until it has been waited for by nobody
        and the last process of the session is gone, so no stranger can have it while one is found."""
        while left := _of_session(process.pid):
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(_POLL)
        process.wait()
        if self._process is process:
            self._process = None

    def _raise_if_unwanted(self) -> None:
        if not self._wanted:
            raise MasterUnreachable("Spark", "it is not started, because this process is ending")


def _of_session(session: int) -> Sequence[int]:
    """Its living processes."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                state, _, _, of, *_ = (entry / "stat").read_text().rpartition(")")[2].split()
                if int(of) == session and state not in "ZX":
                    found.append(int(entry.name))
    return found


JVM = Jvm()
