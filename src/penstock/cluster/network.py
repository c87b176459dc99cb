"""The cluster's network: one namespace per node, connected by a switch in its own namespace.

```
 host                      switch                         node-1
 pstkAAAA ─────veth─────── host ─┐                     ┌── eth0   lo
 10.x.y.1                      bridge ── n1 ───veth────┘   10.x.y.2
                                 └────── n2 ─── …
```

The bridge is not in the host's namespace, so that firewall rules there (for example those of a container engine)
do not apply to traffic between nodes. The host itself gets only one interface. Every name contains the cluster's
tag, so that everything can be found and removed, even if a process died while it created the network.
"""

from __future__ import annotations

import ipaddress
import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from penstock.errors import EnvironmentFault, SettingError
from penstock.texts import parse_json

TOOLS = ("ip", "tc", "unshare")
_CANDIDATES = tuple(ipaddress.IPv4Network(text) for text in ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16"))
_TRIES = 200  # ranges drawn from each candidate: enough to find a free one even if most are in use
_QUEUE_SECONDS = 0.05  # of traffic may queue before a link; beyond that packets are dropped, as by a real switch
_BURST_SECONDS = 0.005  # of the rate may pass at once: slightly more than one tick of the kernel's timer
_LEAST_BURST = 65_536  # bytes: the largest packet that the kernel passes on in one piece
_HOSTS_FOLDER = Path("/etc/netns")  # ``ip netns exec`` mounts this folder's files over /etc, per namespace


@dataclass(frozen=True)
class Rate:
    """The rate of a link, in bits per second."""

    bits: int

    @classmethod
    def parse(cls, text: str) -> Rate | None:
        """Parse ``100mbit``, ``1.5gbit`` or ``800kbit``. ``none`` means no limit and gives None."""
        if text == "none":
            return None
        found = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]?)bit", text.lower())
        bits = int(float(found[1]) * {"": 1, "k": 1e3, "m": 1e6, "g": 1e9}[found[2]]) if found else 0
        if not 8_000 <= bits <= 100_000_000_000:
            raise SettingError(
                f"--link {text}", f"{text!r} is neither a rate between 8kbit and 100gbit nor none", "Try 100mbit."
            )
        return cls(bits)

    def shaping(self, interface: str) -> list[str]:
        """Arguments for tc that limit the traffic leaving through an interface."""
        burst = max(_LEAST_BURST, int(self.bits / 8 * _BURST_SECONDS))
        limit = burst + max(_LEAST_BURST, int(self.bits / 8 * _QUEUE_SECONDS))
        words = ["tbf", "rate", f"{self.bits}bit", "burst", str(burst), "limit", str(limit)]
        return ["qdisc", "add", "dev", interface, "root", *words]


def free_range(used: Iterable[ipaddress.IPv4Network], random: Random) -> ipaddress.IPv4Network:
    """A range of 256 private addresses that overlaps none of the used ones. Raises ``EnvironmentFault``."""
    used = list(used)
    for candidate in _CANDIDATES:
        for _ in range(_TRIES):
            third = random.randrange(2 ** (24 - candidate.prefixlen))
            drawn = ipaddress.IPv4Network((int(candidate.network_address) + third * 256, 24))
            if not any(drawn.overlaps(each) for each in used):
                return drawn
    raise EnvironmentFault(
        "cluster's network",
        f"no range of 256 private addresses is free: {len(used)} routes of this machine "
        f"cover all of {', '.join(map(str, _CANDIDATES))}",
        "Use --plain to run all nodes on loopback, without links.",
    )


def routes(listing: str) -> list[ipaddress.IPv4Network]:
    """The networks in the output of ``ip -j -4 route show table all``, without the default route."""
    found = []
    for route in parse_json(listing or "[]"):
        destination = route.get("dst", "default")
        if destination not in ("default", "0.0.0.0/0"):
            found.append(ipaddress.IPv4Network(destination, strict=False))
    return found


def missing_tools() -> list[str]:
    return [tool for tool in TOOLS if shutil.which(tool) is None]


def usable() -> str:
    """What prevents this process from creating namespaces; empty if nothing does."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = missing_tools()
    return f"{', '.join(missing)} not found" if missing else ""


@dataclass(frozen=True)
class ClusterNetwork:
    """Names and addresses of the network, and methods that create and remove it."""

    tag: str
    """Four characters that are unique among the clusters of this machine."""
    range: str
    rate: int | None
    """Bits per second of each node's link, in each direction."""

    @classmethod
    def choose(cls, tag: str, rate: Rate | None, random: Random) -> ClusterNetwork:
        listing = _run("ip", "-j", "-4", "route", "show", "table", "all")
        return cls(tag, str(free_range(routes(listing), random)), rate.bits if rate else None)

    @property
    def host_address(self) -> str:
        return self.address(0)

    def address(self, number: int) -> str:
        """The address of the node with this number, counted from 1."""
        return str(ipaddress.IPv4Network(self.range)[number + 1])

    @property
    def most(self) -> int:
        """The largest number of nodes that the address range allows."""
        return ipaddress.IPv4Network(self.range).num_addresses - 3

    @property
    def host_link(self) -> str:
        return f"pstk{self.tag}"

    @property
    def switch(self) -> str:
        return f"pstk{self.tag}-switch"

    def namespace(self, node: str) -> str:
        return f"pstk{self.tag}-{node}"

    # ---- making ----------------------------------------------------------------------------------------

    def make_switch(self) -> None:
        """Create the switch and the host's link to it. Raises ``EnvironmentFault``, also if the kernel supports no
        bridge."""
        _run("ip", "netns", "add", self.switch)
        self._in_switch("link", "set", "lo", "up")
        self._in_switch("link", "add", "bridge", "type", "bridge")
        self._in_switch("link", "set", "bridge", "up")
        _run("ip", "link", "add", self.host_link, "type", "veth", "peer", "name", "host", "netns", self.switch)
        self._in_switch("link", "set", "host", "master", "bridge", "up")
        _run("ip", "address", "add", f"{self.host_address}/24", "dev", self.host_link)
        _run("ip", "link", "set", self.host_link, "up")

    def make_node(self, node: str, number: int) -> None:
        """Create a node's namespace and its link, with the rate limited in both directions."""
        namespace, port = self.namespace(node), f"n{number}"
        hosts = _HOSTS_FOLDER / namespace / "hosts"
        hosts.parent.mkdir(parents=True, exist_ok=True)
        hosts.write_text(f"127.0.0.1 localhost\n{self.address(number)} {node}\n")
        _run("ip", "netns", "add", namespace)
        self._in_switch("link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", namespace)
        self._in_switch("link", "set", port, "master", "bridge", "up")
        _run("ip", "-n", namespace, "link", "set", "lo", "up")
        _run("ip", "-n", namespace, "address", "add", f"{self.address(number)}/24", "dev", "eth0")
        _run("ip", "-n", namespace, "link", "set", "eth0", "up")
        if self.rate is not None:
            rate = Rate(self.rate)
            _run("tc", "-n", namespace, *rate.shaping("eth0"))
            _run("tc", "-n", self.switch, *rate.shaping(port))

    def inside(self, node: str, command: Sequence[str]) -> list[str]:
        """The command line that runs a command in the node's namespace with the node's host name. Each step
        replaces the one before it with exec, so that only one process remains."""
        rename = 'echo "$0" > /proc/sys/kernel/hostname && exec "$@"'
        entry = ["ip", "netns", "exec", self.namespace(node), "unshare", "--uts", "sh", "-c", rename, node]
        return [*entry, *command]

    def passed(self, number: int) -> tuple[int, int]:
        """Bytes sent and received by a node over its link so far."""
        listing = _run("ip", "-n", self.switch, "-j", "-s", "link", "show", f"n{number}")
        counters = parse_json(listing)[0]["stats64"]
        return int(counters["rx"]["bytes"]), int(counters["tx"]["bytes"])

    # ---- removing --------------------------------------------------------------------------------------

    def remove_node(self, node: str, number: int) -> None:
        """Remove a node and its link. Whatever is already gone is skipped."""
        _run("ip", "-n", self.switch, "link", "delete", f"n{number}", strict=False)
        self._remove(self.namespace(node))

    def remove(self) -> None:
        """Remove everything with the cluster's tag."""
        _run("ip", "link", "delete", self.host_link, strict=False)
        for namespace in self.left():
            self._remove(namespace)
        for folder in _HOSTS_FOLDER.glob(f"pstk{self.tag}-*"):
            shutil.rmtree(folder, ignore_errors=True)
        if _HOSTS_FOLDER.is_dir() and not any(_HOSTS_FOLDER.iterdir()):
            _HOSTS_FOLDER.rmdir()

    def left(self) -> list[str]:
        """The existing namespaces with the cluster's tag."""
        listing = parse_json(_run("ip", "-j", "netns", "list", strict=False) or "[]")
        return [each["name"] for each in listing if each["name"].startswith(f"pstk{self.tag}-")]

    def _remove(self, namespace: str) -> None:
        _run("ip", "netns", "delete", namespace, strict=False)
        shutil.rmtree(_HOSTS_FOLDER / namespace, ignore_errors=True)

    def _in_switch(self, *words: str) -> None:
        _run("ip", "-n", self.switch, *words)


def _run(*command: str, strict: bool = True) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
        problem = done.stderr.strip() if done.returncode else ""
    except OSError as error:
        problem = str(error)
    if not problem and (not done.returncode or not strict):
        return done.stdout
    if strict:
        raise EnvironmentFault(
            "cluster's network",
            f"'{' '.join(command)}' failed ({problem or f'exit code {done.returncode}'})",
            "This needs root with all capabilities (in a container: --privileged) and a kernel "
            "with network namespaces, veth, bridge and tbf. With --plain the nodes share "
            "the loopback interface.",
        )
    return ""
