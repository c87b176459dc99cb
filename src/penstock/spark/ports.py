"""Lists the sockets that a run listens on and who may connect, and makes the Spark settings that restrict them.

Spark's streaming shuffle listens on all interfaces and accepts every connection. ``penstock-shuffle.jar`` (sources
in ``java/``) makes both ends prove that they know the session's secret. If driver and executors run on one
machine, it also makes the JVM listen on 127.0.0.1 only.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import struct
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

JAR = Path(__file__).with_name("penstock-shuffle.jar")
SHUFFLE_MANAGER = "penstock.shuffle.AuthenticatedShuffleManager"
_LONGEST_FOLDER = 61
"""Longest path of the folder for Spark's Unix sockets, in characters. Spark sets this limit, because the kernel
limits the path of a socket."""
_LISTEN = "0A"  # state of a listening socket in /proc/net/tcp


@dataclass(frozen=True)
class Documented:
    """A kind of listening socket of a run."""

    process: str
    """``driver``: the Python process of the driver; ``acker``: an acker process; ``jvm``: the JVM of the driver or
    of a Spark executor."""
    purpose: str
    address: str
    """Address with a local master. On a cluster Spark's sockets listen on the address of the node."""
    authentication: str


LISTENERS = (
    Documented(
        "driver", "coordinator: control connections of workers, commands", "127.0.0.1", "HMAC of the run's secret"
    ),
    Documented("acker", "delivery.ackers=N: workers send acks", "127.0.0.1", "HMAC of the run's secret"),
    Documented("driver", "status page (--http only)", "127.0.0.1", "none; reads only"),
    Documented("jvm", "Py4J gateway", "127.0.0.1", "token of the process"),
    Documented("jvm", "Spark RPC", "127.0.0.1", "spark.authenticate"),
    Documented("jvm", "block manager", "127.0.0.1", "spark.authenticate"),
    Documented(
        "jvm", "streaming shuffle: one for each task that sends", "127.0.0.1", "HMAC of the session's secret"
    ),
)
"""All TCP sockets that a run listens on. Workers do not listen, but acker processes, which they start, do. The JVM
and its workers use Unix domain sockets in a folder of mode 0700."""


def shuffle_conf(one_machine: bool, local: bool) -> dict[str, str]:
    """Return the settings of the authenticated shuffle. ``local``: driver and executors are one process."""
    conf = {
        "spark.shuffle.manager.incremental": SHUFFLE_MANAGER,
        "spark.penstock.shuffle.loopback": str(one_machine).lower(),
        "spark.driver.extraClassPath": str(JAR),
    }
    return conf if local else {**conf, "spark.jars": JAR.as_uri()}


def secret_conf(one_machine: bool) -> dict[str, str]:
    """Return settings with new secrets for a session. They must not appear on the command line of a process, which
    all users can read."""
    conf = {"spark.penstock.shuffle.secret": secrets.token_hex(32)}
    if one_machine:
        conf |= {"spark.authenticate": "true", "spark.authenticate.secret": secrets.token_hex(32)}
    return conf


def socket_folder(session_folder: Path) -> Path:
    """Return a folder for Spark's Unix sockets that only this user may enter: the session's folder, or a new one
    if that path is too long."""
    if len(str(session_folder)) <= _LONGEST_FOLDER:
        return session_folder
    return Path(tempfile.mkdtemp(prefix="penstock-", dir="/tmp"))


def listening(pid: int) -> set[tuple[str, int]]:
    """Return addresses and ports of the TCP sockets that a process listens on. Empty if /proc cannot be read."""
    try:
        links = [link.readlink() for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()]
    except OSError:
        return set()
    inodes = {str(link)[8:-1] for link in links if str(link).startswith("socket:[")}
    found = set()
    for table in ("tcp", "tcp6"):
        try:
            rows = Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]
        except OSError:
            continue
        for row in rows:
            words = row.split()
            if words[3] == _LISTEN and words[9] in inodes:
                found.add(_address(words[1]))
    return found


def _address(text: str) -> tuple[str, int]:
    """Parse an address of /proc/net/tcp or tcp6, which consists of 32-bit words in the byte order of the
    machine."""
    address, _, port = text.partition(":")
    packed = b"".join(struct.pack("=I", int(address[at : at + 8], 16)) for at in range(0, len(address), 8))
    if packed[:12] == bytes(10) + b"\xff\xff":
        packed = packed[12:]  # an IPv4 address in an IPv6 socket
    family = socket.AF_INET if len(packed) == 4 else socket.AF_INET6
    return socket.inet_ntop(family, packed), int(port, 16)


def beyond_loopback(found: Iterable[tuple[str, int]]) -> list[tuple[str, int]]:
    """Return the sockets that other machines can reach."""
    return sorted(each for each in found if not each[0].startswith("127.") and each[0] != "::1")


def descendants(pid: int) -> list[int]:
    """Return a process and all its descendants, which in ``local-cluster`` mode are the executors. A process whose
    entry in /proc cannot be read is left out."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError, IndexError, ValueError):  # the process has just ended
                parent = int((entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry.name))
    found = [pid]
    for each in found:
        found += children.get(each, [])
    return found


def exposure(pid: int) -> str:
    """Return a warning if the JVM, or a process that it started, listens on more than loopback; otherwise an empty
    text. For runs on one machine."""
    for each in descendants(pid):
        reachable = beyond_loopback(listening(each))
        if reachable:
            ports = ", ".join(f"{address}:{port}" for address, port in reachable[:5])
            return (
                f"Spark's JVM (process {each}) listens on {ports}, which other machines can reach. Connections "
                "must prove that they know the session's secret; block these ports with a firewall to be safe."
            )
    return ""
