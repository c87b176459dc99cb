"""Starts and ends the JVM of Spark's driver. Penstock starts it instead of PySpark, so that any thread can end it
at any time, even while it starts.

The JVM runs in its own process session. A Ctrl-C in the terminal therefore reaches only the driver, and all
processes that the JVM starts (executors of ``local-cluster``, Python workers) can be found by their session.
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

_POLL = 0.02
"""Seconds between two checks of a JVM that starts or ends: adds little delay and uses little CPU."""
_TERMINATE_TIMEOUT = 3.0
"""Seconds that a terminated JVM has for removing its temporary files before it is killed."""
_PORT, _SECRET = "PYSPARK_GATEWAY_PORT", "PYSPARK_GATEWAY_SECRET"


class Jvm:
    """The JVM of this process. There is at most one at a time. ``abandon`` and ``kill`` may be called by any
    thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._wanted = True

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The running JVM. Must not be used before ``launch``."""
        assert self._process is not None
        return self._process

    @property
    def pid(self) -> int | None:
        """Process id of the JVM. None if Penstock has not started one; the user may have opened the session."""
        return None if self._process is None else self._process.pid

    @property
    def wanted(self) -> bool:
        """False after the JVM was abandoned or killed. Its output is ignored from then on."""
        return self._wanted

    def launch(self, settings: SparkConf, within: Path) -> Path:
        """Start the JVM with these settings. Returns the file, in a new folder in ``within``, to which it will
        write its port and secret. Raises ``MasterUnreachable`` if this process is ending."""
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
            self._check_wanted()
            self._process = subprocess.Popen(
                [*command, *shlex.split(os.environ.get("PYSPARK_SUBMIT_ARGS", "pyspark-shell"))],
                stdin=subprocess.PIPE,  # when it closes, the JVM knows that this process has ended
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        return folder / "gateway"

    def connect(self, gateway_file: Path) -> ClientServer:
        """Wait until the JVM has written this file, and connect. Raises ``ChildProcessError`` if the JVM exits
        instead, and ``MasterUnreachable`` if it was abandoned."""
        try:
            while not gateway_file.is_file():
                if self.process.poll() is not None:
                    self._check_wanted()
                    raise ChildProcessError("the JVM exited")
                time.sleep(_POLL)
            with open(gateway_file, "rb") as info:
                port, secret = read_int(info), UTF8Deserializer().loads(info)
        finally:
            shutil.rmtree(gateway_file.parent, ignore_errors=True)
        os.environ.update({_PORT: str(port), _SECRET: secret})  # PySpark uses a running JVM if these are set
        try:
            return launch_gateway()
        finally:
            del os.environ[_PORT], os.environ[_SECRET]

    def end(self, patience: float) -> None:
        """Close the JVM's standard input, which makes it exit, and wait. After ``patience`` seconds the JVM and
        all processes that it started are killed. Does nothing if there is no JVM."""
        process = self._process
        if process is None:
            return
        assert process.stdin is not None
        with contextlib.suppress(OSError):
            process.stdin.close()
        self._await(process, patience)
        self._kill(process)

    def abandon(self) -> None:
        """Terminate the JVM, and do not let this process start another one. Threads that wait for it get an
        error."""
        with self._lock:
            self._wanted = False
            process = self._process
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        self._await(process, _TERMINATE_TIMEOUT)
        self._kill(process)

    def kill(self) -> None:
        """Like ``abandon``, but kills the JVM without giving it time to remove its temporary files."""
        with self._lock:
            self._wanted = False
        if self._process is not None:
            self._kill(self._process)

    def _await(self, process: subprocess.Popen[bytes], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while process.poll() is None and self._process is process and time.monotonic() < deadline:
            time.sleep(_POLL)

    def _kill(self, process: subprocess.Popen[bytes]) -> None:
        """Kill all remaining processes of the JVM's session.

        The session has the process id of the JVM. The kernel does not reuse this id before the JVM has been waited
        for and the last process of the session has ended, so no other process can be killed.
        """
        while left := _processes_of_session(process.pid):
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(_POLL)
        process.wait()
        if self._process is process:
            self._process = None

    def _check_wanted(self) -> None:
        if not self._wanted:
            raise MasterUnreachable("Spark", "it was not started, because this process is ending")


def _processes_of_session(session: int) -> Sequence[int]:
    """Return the ids of the running processes of a session."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                state, _, _, session_id, *_ = (entry / "stat").read_text().rpartition(")")[2].split()
                if int(session_id) == session and state not in "ZX":
                    found.append(int(entry.name))
    return found


JVM = Jvm()
