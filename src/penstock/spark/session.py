"""The Spark session: the settings without which Python operators do not flow in Real-Time Mode, and a JVM
whose output passes through us."""

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
from penstock.errors import MasterUnreachable
from penstock.redaction import printable, redacted
from penstock.spark import class_archive, ports
from penstock.spark.exits import note_exit
from penstock.spark.java import ensure_java
from penstock.spark.jvm import JVM
from penstock.spark.safe_path import SAFE_PATH
from penstock.spark.shipping import PENSTOCK_ZIP
from penstock.texts import MOST_LINE

log = logging.getLogger("penstock.session")

_FAILED = 3.0  # seconds for a JVM in which Spark did not start
LOCAL_SLOTS = 64  # threads local[n] may use; a slot is a thread that mostly waits, not a core

CONF: Mapping[str, str] = {
    # Python operators are not on Real-Time Mode's list of known-good operators yet.
    "spark.sql.streaming.realTimeMode.allowlistCheck": "false",
    # Input and output of the Python worker on separate threads; without it rows wait for the batch's end.
    "spark.python.udf.pipelined.enabled": "true",
    # TCP to the worker costs 40 ms a turn (delayed ACK).
    "spark.python.unix.domain.socket.enabled": "true",
    # One frame per Arrow batch, and no buffer that a small frame would wait in.
    "spark.sql.execution.arrow.maxRecordsPerBatch": "1",
    "spark.sql.execution.python.udf.buffer.size": "64",
    "spark.sql.execution.pandas.udf.buffer.size": "64",
    "spark.sql.execution.arrow.compression.codec": "none",
    # The shuffle between stages packs rows into buffers of 32 KB and sends them by a timer. Our rows are packed
    # already: a buffer smaller than any row sends each at once, and no timer need run a thousand times a second.
    "spark.shuffle.streaming.networkBufferSize": "16",
    "spark.shuffle.streaming.networkBufferMaxWaitTimeMs": "50",
    # What a sender may have in flight counts in such buffers, whatever the rows' real size: 8 rows to a single
    # target, beside 33,280 bytes that Spark deducts for sockets; never less than 2 rows per target.
    "spark.shuffle.streaming.writerMaxMemory": str(33_280 + 8 * 16),
    "spark.shuffle.streaming.readerMaxMemory": "262144",
    "spark.shuffle.streaming.checksum.enabled": "false",
    "spark.python.daemon.module": "penstock.spark.daemon",
    "spark.driver.memory": "2g",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.adaptive.enabled": "false",
}

# The JVM only moves frames, mostly in native code. The C2 compiler took 10 s of CPU at each start, most of a
# core just when the first tuples flow, to save a tenth of a core later. G1, because the other collectors stop the
# world for a second when old space or class space runs full; with room for the classes it need not even look.
JAVA_OPTIONS = "-XX:TieredStopAtLevel=1 -XX:+UseG1GC -XX:MetaspaceSize=256m"

# Lines of the JVM's that say nothing to a user.
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
    """The newest lines Spark's JVM and the workers printed."""
    return list(_log)


def say_through(say: Callable[[str], None]) -> None:
    """Where the lines of Spark and of users' ``print`` go; a live view puts itself here."""
    global _say
    _say = say


def open_session(master: str | None = None, conf: Mapping[str, str] | None = None) -> SparkSession:
    """The session to run topologies in: the one that is open, else a new one on ``master``.

    Raises ``JavaMissing`` or ``MasterUnreachable``.
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
        ours = {**CONF, **_python_conf(master), **_port_conf(master), **_cluster_conf(master)}
        for key, value in {**ours, **(conf or {})}.items():
            settings.set(key, value)
        spark = _start(settings, master)
    if is_local(master):  # elsewhere the nodes do not have our code yet
        threading.Thread(target=_warm_up, args=(spark,), name="spark-warm-up", daemon=True).start()
    return spark


def _open_now() -> SparkSession | None:
    """The process's session, whichever thread opened it."""
    session = SparkSession._instantiatedSession
    return session if session is not None and session.sparkContext._jsc is not None else None


def _start(settings: SparkConf, master: str) -> SparkSession:
    interrupt = signal.getsignal(signal.SIGINT)
    try:
        said = JVM.launch(settings, session_folder())
        threading.Thread(target=_pump, args=(JVM.process.stdout,), name="spark-output", daemon=True).start()
        gateway = JVM.connect(said)
        for key, value in _secret_conf(master).items():  # not before: what the JVM is started with all can read
            settings.setIfMissing(key, value)
        context = SparkContext(conf=settings, gateway=gateway)
        # PySpark's accumulator server prints a stack trace when the JVM goes away; the supervisor tells that.
        context._accumulatorServer.handle_error = lambda *ignored: None
        return SparkSession(context)
    except Exception as error:  # py4j wraps whatever the JVM throws
        reason = _first_line(error)  # py4j asks the JVM for the text, so before the JVM ends
        JVM.end(_FAILED)
        SparkContext._gateway = SparkContext._jvm = None
        if isinstance(error, MasterUnreachable):
            raise
        cause = None if isinstance(error, Py4JError) else error  # without a JVM it has no text
        raise MasterUnreachable(
            f"master {master}", f"Spark did not start there: {reason}", "See --master in penstock run --help."
        ) from cause
    finally:
        # PySpark's own handler cancels all jobs on Ctrl-C, before a topology could drain.
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, interrupt)


def _warm_up(spark: SparkSession) -> None:
    """Have Spark start its Python side while the first query is still being planned: a second or two less
    until the first tuple."""
    try:
        spark.range(0, 1, 1, 1).mapInArrow(_pass_on, "id long").collect()
    except Exception as error:  # only a head start was lost; what is really wrong shows in the query
        log.debug("warm-up: %s", error)


def _pass_on(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    yield from batches


def close_session(patience: float = 30.0) -> None:
    """Stop Spark and its JVM, so that nothing is left behind."""
    global _folder, _sockets
    active, gateway = _open_now(), SparkContext._gateway
    try:
        if active is not None:
            active.stop()
        if gateway is not None:
            gateway.shutdown()
    except Exception as error:  # a JVM that died on its own is closed, too
        log.debug("closing Spark: %s", error)
    finally:
        JVM.end(patience)
        SparkContext._gateway = SparkContext._jvm = None
        _remove_folders()
        _folder = _sockets = None


def abandon_session(at_once: bool = False) -> None:
    """End Spark whatever it is doing, also while it starts; this process starts no other. Whoever waits for Spark
    gets an error. ``at_once``: kill it, where it would get a few seconds else. From any thread."""
    if at_once:
        JVM.kill()
    else:
        JVM.abandon()
    _remove_folders()


def _remove_folders() -> None:
    """With all temporary files of the JVM, which a JVM that was killed leaves behind."""
    for folder in (_sockets, _folder):
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


def session_folder() -> Path:
    """Where files live that Spark's nodes may fetch as long as the session is open."""
    global _folder
    if _folder is None:
        _folder = Path(tempfile.mkdtemp(prefix="penstock-session-"))
    return _folder


def total_slots(spark: SparkSession) -> int:
    """Task slots the master offers now; not those of nodes that are being drained."""
    context = spark.sparkContext._jsc.sc()
    return int(context.maxNumConcurrentTasks(context.resourceProfileManager().defaultResourceProfile()))


def joined(spark: SparkSession) -> int:
    """Spark executors that have joined so far, the driver not counted."""
    return int(spark.sparkContext._jsc.sc().getExecutorMemoryStatus().size()) - 1


def expected(master: str) -> int | None:
    """Nodes that are about to join; None where nobody knows."""
    found = re.fullmatch(r"local-cluster\[\s*(\d+)\s*,.*\]", master)
    if found:
        return int(found[1])
    cluster = cluster_record.find(master)
    return sum(not node.draining for node in cluster.nodes) if cluster is not None else None


def exposure(spark: SparkSession) -> str:
    """What to tell if a run on this machine listens on more than loopback; else an empty text. Asked when a query
    runs: its sockets are opened then."""
    pid = JVM.pid
    if pid is None or not one_machine(spark.sparkContext.master):
        return ""  # on a cluster its nodes' addresses are meant
    return ports.exposure(pid)


def one_machine(master: str) -> bool:
    """Driver and executors run on this machine and need no other address than 127.0.0.1."""
    return is_local(master) or master.startswith("local-cluster[")


def is_local(master: str) -> bool:
    """Driver and executors are one process."""
    return re.fullmatch(r"local(\[.*\])?", master) is not None


def _python_conf(master: str) -> dict[str, Any]:
    """How the workers find Python, Penstock and our log settings."""
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
        # Files of addPyFile arrive in an executor's own folder, which is also where its Python starts.
        conf["spark.executorEnv.PYTHONPATH"] = f"./{PENSTOCK_ZIP}"
    return conf


def _temporary_files() -> str:
    """Java's option for a folder that goes with the session, however the JVM ends. It is also Spark's local folder
    unless the user has set SPARK_LOCAL_DIRS."""
    folder = session_folder() / "java"
    folder.mkdir(exist_ok=True)
    return shlex.quote(f"-Djava.io.tmpdir={folder}")


def _set_local_ip(address: str) -> None:
    """Unless the user has chosen one."""
    global _local_ip
    if os.environ.get("SPARK_LOCAL_IP") == _local_ip:
        os.environ["SPARK_LOCAL_IP"] = _local_ip = address


def _cluster_conf(master: str) -> dict[str, str]:
    """Nodes can be drained and left; for masters of Spark's own kind our options of Java, and on a cluster of ours
    one executor per node."""
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
    """Secrets of this session, and the one that a cluster of ours wants to hear before it runs anything."""
    conf = ports.secret_conf(one_machine(master))
    cluster = cluster_record.find(master)
    if cluster is not None:
        conf |= {"spark.authenticate": "true", "spark.authenticate.secret": cluster.secret}
    return conf


def _port_conf(master: str) -> dict[str, str]:
    """Who may connect to Spark's sockets."""
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
    """The address of this machine for the master's nodes: loopback unless the master is elsewhere."""
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
    """Fail at once where Spark would try for a minute."""
    if not re.match(r"(local(\[[^\]]+\])?|local-cluster\[.+\]|spark://.+:\d+|yarn|k8s://.+)$", master):
        raise MasterUnreachable(
            f"master {master}",
            "it is not of the form local[N], local-cluster[NODES,CORES,MB], spark://HOST:PORT, yarn or k8s://…",
        )
    host = _spark_host(master)
    if host is None:
        return
    try:
        socket.create_connection(host, 5).close()
    except OSError as error:
        raise MasterUnreachable(
            f"master {master}",
            f"the master does not answer: {error.strerror or error}",
            "Is it running, and is the address right? Without --master the topology runs on this machine.",
        ) from error


def _check_open_session(spark: SparkSession, master: str | None) -> None:
    current = spark.sparkContext.master
    if master is not None and master != current:
        raise MasterUnreachable(f"master {master}", f"this process already has a Spark session, on {current}")
    wrong = [key for key, value in CONF.items() if spark.sparkContext.getConf().get(key) != value]
    needed = [key for key in wrong if key.startswith(("spark.python", "spark.shuffle.streaming.network"))]
    if needed:
        raise MasterUnreachable(
            "the open Spark session",
            f"it has {needed[0]}={spark.sparkContext.getConf().get(needed[0])}, not the "
            "settings of penstock.spark.session.CONF",
            "Let Penstock open the session, or set them when you build yours.",
        )


def _pump(stream: IO[bytes]) -> None:
    """Pass on what the JVM and the workers print, except what is known to be noise, and the stack traces of a JVM
    that was ended in the middle of its work."""
    for raw in _lines(stream):
        line = raw.decode(errors="replace").rstrip("\r\n")
        if not _NOISE.match(line) and not note_exit(line):
            line = redacted(line)
            _log.append(line)
            if JVM.wanted:
                _say(line)


def _lines(stream: IO[bytes]) -> Iterator[bytes]:
    """The stream's lines; of a line that is longer than ``MOST_LINE`` bytes the beginning, and that it was cut."""
    while raw := stream.readline(MOST_LINE):
        cut = not raw.endswith(b"\n")
        left_out = 0
        while cut and (more := stream.readline(1 << 20)):
            left_out += len(more)
            if more.endswith(b"\n"):
                break
        yield raw + b" ... [%d more bytes, cut]" % left_out if left_out > 1 else raw


def _at_exit() -> None:
    """For a script that forgot to close the session, or was interrupted. A fork of this process is not meant."""
    if os.getpid() == _OWNER:
        abandon_session(at_once=True)


_OWNER = os.getpid()
atexit.register(_at_exit)


def _first_line(error: BaseException) -> str:
    if isinstance(error, ChildProcessError):
        return "the JVM exited: " + " / ".join(_log)[-500:]
    try:
        text = str(error)
    except Py4JError:  # the JVM that has the text is gone
        return f"the JVM did not say: {' / '.join(_log)[-500:]}"
    found = re.search(r"(?:Caused by: |: )((?:org|java)\.[\w.$]+(?:: [^\n]+)?)", text)
    return found[1] if found else text.splitlines()[0] if text else repr(error)
