"""Which sockets a run listens on, who may connect to them, and the Spark settings that make it so.

Spark's streaming shuffle listens on all interfaces and accepts every connection. ``penstock-shuffle.jar`` (sources
in ``java/``) makes both of its ends prove that they know the session's secret; where driver and executors are on
one machine, it also makes the JVM listen on 127.0.0.1 only.
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
"""Characters of the folder of Spark's Unix sockets: the limit of Spark."""
_LISTEN = "0A"


@dataclass(frozen=True)
class Documented:
    """A kind of listening socket that a run has."""

    process: str
    """``driver``: the Python process that runs the topology; ``jvm``: Spark's, of the driver or of an executor."""
    purpose: str
    address: str
    """On a local master; on a cluster those of Spark listen on the node's own address."""
    authentication: str


LISTENERS = (
    Documented(
        "driver", "coordinator: control connections of workers, commands", "127.0.0.1", "HMAC of the run's secret"
    ),
    Documented("driver", "status page (--http only)", "127.0.0.1", "none; reads only"),
    Documented("jvm", "Py4J gateway", "127.0.0.1", "token of the process"),
    Documented("jvm", "Spark RPC", "127.0.0.1", "spark.authenticate"),
    Documented("jvm", "block manager", "127.0.0.1", "spark.authenticate"),
    Documented(
        "jvm", "streaming shuffle: one for each task that sends", "127.0.0.1", "HMAC of the session's secret"
    ),
)
"""All TCP sockets that a run listens on. Workers listen on none. Sockets between the JVM and its workers are Unix
domain sockets in a folder of mode 0700."""


def shuffle_conf(one_machine: bool, local: bool) -> dict[str, str]:
    """Settings for the authenticated shuffle. ``local``: driver and executors are one process."""
    conf = {
        "spark.shuffle.manager.incremental": SHUFFLE_MANAGER,
        "spark.penstock.shuffle.loopback": str(one_machine).lower(),
        "spark.driver.extraClassPath": str(JAR),
    }
    return conf if local else {**conf, "spark.jars": JAR.as_uri()}


def secret_conf(one_machine: bool) -> dict[str, str]:
    """Secrets of this session. They must not be on the command line of a process."""
    conf = {"spark.penstock.shuffle.secret": secrets.token_hex(32)}
    if one_machine:
        conf |= {"spark.authenticate": "true", "spark.authenticate.secret": secrets.token_hex(32)}
    return conf


def socket_folder(session_folder: Path) -> Path:
    """A folder that only this user may enter, for Spark's Unix sockets. Its path is short enough for them."""
    if len(str(session_folder)) <= _LONGEST_FOLDER:
        return session_folder
    return Path(tempfile.mkdtemp(prefix="penstock-", dir="/tmp"))


def listening(pid: int) -> set[tuple[str, int]]:
    """Addresses and ports of the TCP sockets that a process listens on. Empty where /proc does not tell."""
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
    """As /proc/net/tcp and tcp6 have it: words of 32 bits in the byte order of the machine."""
    address, _, port = text.partition(":")
    packed = b"".join(struct.pack("=I", int(address[at : at + 8], 16)) for at in range(0, len(address), 8))
    if packed[:12] == bytes(10) + b"\xff\xff":
        packed = packed[12:]  # an IPv4 address of a socket that could have an IPv6 one
    family = socket.AF_INET if len(packed) == 4 else socket.AF_INET6
    return socket.inet_ntop(family, packed), int(port, 16)


def beyond_loopback(found: Iterable[tuple[str, int]]) -> list[tuple[str, int]]:
    """Those that other machines can reach."""
    return sorted(each for each in found if not each[0].startswith("127.") and each[0] != "::1")


def descendants(pid: int) -> list[int]:
    """The process and all that it has started, with theirs: in ``local-cluster`` the executors. Empty where /proc
    does not tell."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError, IndexError, ValueError):  # it has ended meanwhile
                parent = int((entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry.name))
    found = [pid]
    for each in found:
        found += children.get(each, [])
    return found


def exposure(pid: int) -> str:
    """For a run on one machine: what to tell if its JVM, or a process that it has started, listens on more than
    loopback; else an empty text."""
    for each in descendants(pid):
        reachable = beyond_loopback(listening(each))
        if reachable:
            ports = ", ".join(f"{address}:{port}" for address, port in reachable[:5])
            return (
                f"Spark's JVM (process {each}) listens on {ports}, which other machines can reach. Connections "
                "must prove that they know the session's secret; block these ports with a firewall to be safe."
            )
    return ""
