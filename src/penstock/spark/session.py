"""Opens and closes the Spark session, with the settings that Python operators need in Real-Time Mode, and passes
on the output of its JVM."""

from __future__ import annotations

import atexit
import logging
import os
import re
import shlex
import shutil
import signal
import socket
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
from py4j.protocol import Py4JError
from pyspark import SparkConf, SparkContext
from pyspark.sql import SparkSession

from penstock.cluster import record as cluster_record
from penstock.errors import MasterUnreachable, SettingError
from penstock.redaction import printable, redacted
from penstock.spark import class_archive, ports
from penstock.spark.exits import note_exit
from penstock.spark.java import ensure_java
from penstock.spark.jvm import JVM
from penstock.spark.safe_path import SAFE_PATH
from penstock.spark.shipping import PENSTOCK_ZIP
from penstock.texts import MOST_LINE

log = logging.getLogger("penstock.session")

_FAILED_TIMEOUT = 3.0
"""Seconds that the JVM has for exiting after Spark failed to start in it."""
_MASTER_TIMEOUT = 5.0
"""Seconds to wait for a connection to the master. Spark itself would try for a minute."""
LOCAL_SLOTS = 64
"""Task slots in local mode. More than there are cores, because a slot is a thread that mostly waits."""

CONF: Mapping[str, str] = {
    # Python operators are not on Real-Time Mode's list of allowed operators yet.
    "spark.sql.streaming.realTimeMode.allowlistCheck": "false",
    # Spark writes to and reads from the Python worker on separate threads. Otherwise rows wait for the end of a
    # batch.
    "spark.python.udf.pipelined.enabled": "true",
    # A TCP connection to the worker adds 40 ms per round trip (delayed ACK).
    "spark.python.unix.domain.socket.enabled": "true",
    # One frame per Arrow batch, and buffers so small that no frame waits in them.
    "spark.sql.execution.arrow.maxRecordsPerBatch": "1",
    "spark.sql.execution.python.udf.buffer.size": "64",
    "spark.sql.execution.pandas.udf.buffer.size": "64",
    "spark.sql.execution.arrow.compression.codec": "none",
    # The shuffle between stages collects rows in buffers of 32 KB and sends them by a timer. Penstock's rows are
    # frames of many tuples already. With a buffer smaller than any row each row is sent at once, so the timer can
    # be slow.
    "spark.shuffle.streaming.networkBufferSize": "16",
    "spark.shuffle.streaming.networkBufferMaxWaitTimeMs": "50",
    # Limits what a sender has in flight, counted in such buffers regardless of the size of the rows: 8 rows if
    # there is a single target, and always at least 2 rows per target. Spark deducts 33,280 bytes for sockets.
    "spark.shuffle.streaming.writerMaxMemory": str(33_280 + 8 * 16),
    "spark.shuffle.streaming.readerMaxMemory": "262144",
    "spark.shuffle.streaming.checksum.enabled": "false",
    "spark.python.daemon.module": "penstock.spark.daemon",
    "spark.driver.memory": "2g",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.adaptive.enabled": "false",
}

# The JVM only moves frames, mostly in native code. TieredStopAtLevel=1 turns the C2 compiler off: it used 10 s of
# CPU at each start, while the first tuples flow, and saved only a tenth of a core later. UseG1GC: the other
# collectors pause for a second when the old generation or the metaspace is full. MetaspaceSize: room for all of
# Spark's classes, so that loading them triggers no collection.
JAVA_OPTIONS = "-XX:TieredStopAtLevel=1 -XX:+UseG1GC -XX:MetaspaceSize=256m"

# Lines of the JVM that are of no use to users.
_NOISE = re.compile(
    r"WARNING: (Using incubator modules|A (restricted|terminally)|Use --|Restricted|.*sun\.misc\.Unsafe)"
    r"|Setting default log level|To adjust logging level|Using Spark's default log4j"
    r"|(NOTE: )?Picked up \w+_OPTIONS|^\s*$"
)

_log: deque[str] = deque(maxlen=200)
_folder: Path | None = None
_sockets: Path | None = None
_local_ip: str | None = None
_opening = threading.Lock()


def _to_standard_error(line: str) -> None:
    print(printable(line, multiline=True), file=sys.stderr)


_say: Callable[[str], None] = _to_standard_error


def log_lines() -> list[str]:
    """Return the newest lines (up to 200) that Spark's JVM and the workers printed."""
    return list(_log)


def say_through(say: Callable[[str], None]) -> None:
    """Set the function that prints the lines of Spark and of users' ``print``. It is called on the thread that
    reads the JVM's output. Live views of the command line use it."""
    global _say
    _say = say


def open_session(master: str | None = None, conf: Mapping[str, str] | None = None) -> SparkSession:
    """Return the open session, or open a new one on ``master``. May be called by any thread.

    ``conf`` overrides Penstock's settings for a new session. Raises ``JavaMissing`` if there is no suitable Java,
    and ``MasterUnreachable`` if the master cannot be used or the open session does not have the needed settings.
    """
    with _opening:
        active = _open_now()
        if active is not None:
            _check_open_session(active, master)
            return active
        ensure_java()
        master = master or f"local[{LOCAL_SLOTS}]"
        _check_master(master)
        settings = SparkConf(loadDefaults=False).setMaster(master).setAppName("penstock")
        defaults = {**CONF, **_python_conf(master), **_port_conf(master), **_cluster_conf(master)}
        for key, value in {**defaults, **(conf or {})}.items():
            settings.set(key, value)
        spark = _start(settings, master)
    if is_local(master):  # other nodes do not have Penstock's code yet
        threading.Thread(target=_warm_up, args=(spark,), name="spark-warm-up", daemon=True).start()
    return spark


def _open_now() -> SparkSession | None:
    """Return the session of this process, whichever thread opened it."""
    session = SparkSession._instantiatedSession
    return session if session is not None and session.sparkContext._jsc is not None else None


def _start(settings: SparkConf, master: str) -> SparkSession:
    interrupt = signal.getsignal(signal.SIGINT)
    try:
        gateway_file = JVM.launch(settings, session_folder())
        threading.Thread(target=_pump, args=(JVM.process.stdout,), name="spark-output", daemon=True).start()
        gateway = JVM.connect(gateway_file)
        for key, value in _secret_conf(
            master
        ).items():  # set here, because all users can read the JVM's command line
            settings.setIfMissing(key, value)
        context = SparkContext(conf=settings, gateway=gateway)
        # PySpark's accumulator server prints a stack trace when the JVM ends. The supervisor reports that.
        context._accumulatorServer.handle_error = lambda *ignored: None
        return SparkSession(context)
    except Exception as error:  # py4j wraps whatever the JVM throws
        reason = _first_line(error)  # before the JVM ends, because py4j fetches the text from it
        JVM.end(_FAILED_TIMEOUT)
        SparkContext._gateway = SparkContext._jvm = None
        if isinstance(error, MasterUnreachable):
            raise
        cause = (
            None if isinstance(error, Py4JError) else error
        )  # its text cannot be fetched after the JVM has ended
        raise MasterUnreachable(
            f"master {master}", f"Spark did not start there: {reason}", "See --master in penstock run --help."
        ) from cause
    finally:
        # PySpark's own handler would cancel all jobs on Ctrl-C, before the topology can drain.
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, interrupt)


def _warm_up(spark: SparkSession) -> None:
    """Make Spark start its Python daemon while the first query is still being planned. The first tuple arrives one
    or two seconds earlier. Runs on a thread of its own."""
    try:
        spark.range(0, 1, 1, 1).mapInArrow(_pass_on, "id long").collect()
    except Exception as error:  # harmless: the query itself will report a real problem
        log.debug("warm-up of Spark's Python daemon failed: %s", error)


def _pass_on(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    yield from batches


def close_session(patience: float = 30.0) -> None:
    """Stop Spark and its JVM, and remove their temporary files. The JVM is killed after ``patience`` seconds. Does
    not raise if the JVM has died."""
    global _folder, _sockets
    active, gateway = _open_now(), SparkContext._gateway
    try:
        if active is not None:
            active.stop()
        if gateway is not None:
            gateway.shutdown()
    except Exception as error:  # the JVM may have died already
        log.debug("error while closing Spark: %s", error)
    finally:
        JVM.end(patience)
        SparkContext._gateway = SparkContext._jvm = None
        _remove_folders()
        _folder = _sockets = None


def abandon_session(at_once: bool = False) -> None:
    """End Spark at any time, even while it starts. This process cannot start another JVM afterwards, and threads
    that wait for Spark get an error. ``at_once``: kill the JVM instead of giving it a few seconds. May be called
    by any thread."""
    if at_once:
        JVM.kill()
    else:
        JVM.abandon()
    _remove_folders()


def _remove_folders() -> None:
    """Remove the session's folders with all temporary files of the JVM, which a killed JVM leaves behind."""
    for folder in (_sockets, _folder):
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


def session_folder() -> Path:
    """Return the folder of files that Spark's nodes may fetch while the session is open."""
    global _folder
    if _folder is None:
        _folder = Path(tempfile.mkdtemp(prefix="penstock-session-"))
    return _folder


def total_slots(spark: SparkSession) -> int:
    """Return the number of task slots that the master offers now, without those of nodes that are being
    drained."""
    context = spark.sparkContext._jsc.sc()
    return int(context.maxNumConcurrentTasks(context.resourceProfileManager().defaultResourceProfile()))


def joined(spark: SparkSession) -> int:
    """Return the number of Spark executors that have joined, without the driver."""
    return int(spark.sparkContext._jsc.sc().getExecutorMemoryStatus().size()) - 1


def expected(master: str) -> int | None:
    """Return the number of nodes that will join, or None if it is unknown."""
    found = re.fullmatch(r"local-cluster\[\s*(\d+)\s*,.*\]", master)
    if found:
        return int(found[1])
    cluster = cluster_record.find(master)
    return sum(not node.draining for node in cluster.nodes) if cluster is not None else None


def exposure(spark: SparkSession) -> str:
    """Return a warning if a run on this machine listens on more than loopback; otherwise an empty text. Called
    while a query runs, because Spark opens the sockets then."""
    pid = JVM.pid
    if pid is None or not one_machine(spark.sparkContext.master):
        return ""  # on a cluster Spark must listen on the addresses of the nodes
    return ports.exposure(pid)


def one_machine(master: str) -> bool:
    """Return whether driver and executors all run on this machine and need no address but 127.0.0.1."""
    return is_local(master) or master.startswith("local-cluster[")


def is_local(master: str) -> bool:
    """Return whether driver and executors are one process."""
    return re.fullmatch(r"local(\[.*\])?", master) is not None


def _python_conf(master: str) -> dict[str, Any]:
    """Return the settings with which Spark finds Python, Penstock and the log configuration."""
    package_root = str(Path(__file__).resolve().parents[2])
    os.environ["PYSPARK_PYTHON"] = os.environ.get("PYSPARK_PYTHON", sys.executable)
    _set_local_ip(reachable_address(master))
    settings_file = Path(__file__).with_name("log4j2.properties")
    options = (
        f"-Dlog4j2.configurationFile={settings_file.as_uri()} {_temporary_files()} {JAVA_OPTIONS} "
        f"{class_archive.java_options()}"
    )
    conf = {"spark.driver.extraJavaOptions": options, f"spark.executorEnv.{SAFE_PATH}": "1"}
    if is_local(master):
        known = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        if package_root not in known:
            os.environ["PYTHONPATH"] = os.pathsep.join([package_root, *filter(None, known)])
    else:
        # Spark puts files of addPyFile into the folder of the executor, which is the current folder of its Python.
        conf["spark.executorEnv.PYTHONPATH"] = f"./{PENSTOCK_ZIP}"
    return conf


def _temporary_files() -> str:
    """Return the Java option that puts temporary files into the session's folder, so that they are removed however
    the JVM ends. Spark uses it as its local folder, too, unless the user has set SPARK_LOCAL_DIRS."""
    folder = session_folder() / "java"
    folder.mkdir(exist_ok=True)
    return shlex.quote(f"-Djava.io.tmpdir={folder}")


def _set_local_ip(address: str) -> None:
    """Set SPARK_LOCAL_IP, unless the user has set it."""
    global _local_ip
    if os.environ.get("SPARK_LOCAL_IP") == _local_ip:
        os.environ["SPARK_LOCAL_IP"] = _local_ip = address


def _cluster_conf(master: str) -> dict[str, str]:
    """Return the settings for clusters. Nodes can be decommissioned; executors of a standalone master get
    Penstock's Java options; a cluster that Penstock started runs one executor per node."""
    conf = {} if is_local(master) else {"spark.decommission.enabled": "true"}
    if _spark_host(master) is None:
        return conf
    conf["spark.executor.extraJavaOptions"] = JAVA_OPTIONS
    cluster = cluster_record.find(master)
    if cluster is not None:
        conf["spark.executor.cores"] = str(cluster.slots)
        conf["spark.executor.memory"] = cluster.memory
    return conf


def _secret_conf(master: str) -> dict[str, str]:
    """Return settings with the secrets of this session, and the secret of the cluster if Penstock started it."""
    conf = ports.secret_conf(one_machine(master))
    cluster = cluster_record.find(master)
    if cluster is not None:
        conf |= {"spark.authenticate": "true", "spark.authenticate.secret": cluster.secret}
    return conf


def _port_conf(master: str) -> dict[str, str]:
    """Return the settings that restrict who may connect to Spark's sockets."""
    conf = ports.shuffle_conf(one_machine(master), is_local(master))
    if one_machine(master) or cluster_record.find(master) is not None:
        conf["spark.python.unix.domain.socket.dir"] = str(_socket_folder())
    return conf


def _socket_folder() -> Path:
    global _sockets
    if _sockets is None:
        _sockets = ports.socket_folder(session_folder())
    return _sockets


def reachable_address(master: str) -> str:
    """Return the address at which the master's nodes reach this machine: loopback unless there is a standalone
    master."""
    host = _spark_host(master)
    if host is None:
        return "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(host)
        address: str = probe.getsockname()[0]
        return address


def _spark_host(master: str) -> tuple[str, int] | None:
    found = re.fullmatch(r"spark://([^:,/]+):(\d+)(,.*)?", master)
    return (found[1], int(found[2])) if found else None


def _check_master(master: str) -> None:
    """Raise ``SettingError`` if the master is not valid, and ``MasterUnreachable`` if it does not answer; Spark
    would try for a minute."""
    local = r"local(\[(\d+|\*)(, *\d+)?\])?|local-cluster\[\d+ *, *\d+ *, *\d+\]"
    if not re.fullmatch(local + r"|spark://.+:\d+|yarn|k8s://.+", master):
        raise SettingError(
            f"master {master}",
            "it does not have the form local[N], local-cluster[NODES,CORES,MB], spark://HOST:PORT, yarn or k8s://…",
        )
    host = _spark_host(master)
    if host is None:
        return
    try:
        socket.create_connection(host, _MASTER_TIMEOUT).close()
    except OSError as error:
        raise MasterUnreachable(
            f"master {master}",
            f"the master does not answer: {error.strerror or error}",
            "Check its address, and that it is running. Without --master the topology runs on this machine.",
        ) from error


def _check_open_session(spark: SparkSession, master: str | None) -> None:
    current = spark.sparkContext.master
    if master is not None and master != current:
        hint = "Stop that session first, or use its master."
        raise MasterUnreachable(f"master {master}", f"this process already has a Spark session on {current}", hint)
    wrong = [key for key, value in CONF.items() if spark.sparkContext.getConf().get(key) != value]
    needed = [key for key in wrong if key.startswith(("spark.python", "spark.shuffle.streaming.network"))]
    if needed:
        raise MasterUnreachable(
            "the open Spark session",
            f"it has {needed[0]}={spark.sparkContext.getConf().get(needed[0])}, which differs from "
            "penstock.spark.session.CONF",
            "Let Penstock open the session, or use the settings of CONF when you build yours.",
        )


def _pump(stream: IO[bytes]) -> None:
    """Pass on the output of the JVM and the workers, except for known noise and the output of a JVM that is being
    killed. Runs on a thread of its own until the JVM exits."""
    for raw in _lines(stream):
        line = raw.decode(errors="replace").rstrip("\r\n")
        if not _NOISE.match(line) and not note_exit(line):
            line = redacted(line)
            _log.append(line)
            if JVM.wanted:
                _say(line)


def _lines(stream: IO[bytes]) -> Iterator[bytes]:
    """Yield the lines of a stream. A line longer than ``MOST_LINE`` bytes is truncated, with a note."""
    while raw := stream.readline(MOST_LINE):
        truncated = not raw.endswith(b"\n")
        left_out = 0
        while truncated and (more := stream.readline(1 << 20)):
            left_out += len(more)
            if more.endswith(b"\n"):
                break
        yield raw + b" ... [%d more bytes]" % left_out if left_out > 1 else raw


def _at_exit() -> None:
    """End Spark if a script was interrupted or did not close the session. Does nothing in a fork of this
    process."""
    if os.getpid() == _OWNER:
        abandon_session(at_once=True)


_OWNER = os.getpid()
atexit.register(_at_exit)


def _first_line(error: BaseException) -> str:
    if isinstance(error, ChildProcessError):
        return "the JVM exited: " + " / ".join(_log)[-500:]
    try:
        text = str(error)
    except Py4JError:  # the text was in the JVM, which has ended
        return f"the JVM gave no reason; its last output: {' / '.join(_log)[-500:]}"
    found = re.search(r"(?:Caused by: |: )((?:org|java)\.[\w.$]+(?:: [^\n]+)?)", text)
    return found[1] if found else text.splitlines()[0] if text else repr(error)
