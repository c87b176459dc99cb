"""Nodes with a speed and a queue of fixed length, and links with a bandwidth and a delay (*Sun 2022*, figures 3
and 4).

Sizes are in MB, times in seconds. A node takes a packet from its queue, works on it for size / speed seconds and
sends it on. A sender asks its router which link a packet takes, and waits while that link is not ready. After
every change it asks again, so that a waiting packet can take another way. Nothing is dropped: a packet that
arrives at a full queue waits at the end of its link.

Steps are callbacks of SimPy timeouts: three per packet and hop. Processes and stores would need a dozen.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import simpy

LINK_BUFFER = 2
"""Packets a link accepts before its sender must wait: one on the wire and one behind it, as in a small buffer."""


@dataclass(frozen=True)
class Packet:
    number: int
    bound: str
    """The branch that its identifier names."""
    gap: float
    """Seconds the source takes to produce it."""
    flow: int
    value: int
    size: float = 1.0


@dataclass(frozen=True)
class NodeSpec:
    name: str
    speed: float
    """MB per second."""
    queue: int
    """Capacity in packets."""


@dataclass(frozen=True)
class LinkSpec:
    source: str
    target: str
    bandwidth: float
    """MB per second."""
    delay: float
    """Seconds, for data and for the signals sent back."""


class LinkControl:
    """Decides whether a link's sender may send. This one always permits it; ``sim.flow`` has others."""

    @property
    def open(self) -> bool:
        return True

    def record_sent(self) -> None:
        """Called when the sender has sent a packet."""


def after(env: simpy.Environment, seconds: float, act: Callable[[], None]) -> None:
    env.timeout(seconds).callbacks.append(lambda _: act())


class SimLink:
    """Transfers packets one after the other at its bandwidth; each then takes the delay."""

    def __init__(self, env: simpy.Environment, spec: LinkSpec, source: SimNode, target: SimNode) -> None:
        self.spec, self.source, self.target = spec, source, target
        self.control = LinkControl()
        self.taken = 0
        """Packets of this link that the target has taken from its queue."""
        self._env = env
        self._waiting = 0
        self._free_at = 0.0

    @property
    def ready(self) -> bool:
        return self._waiting < LINK_BUFFER and self.control.open

    def send(self, packet: Packet) -> None:
        """Send a packet. The link must be ready."""
        self._waiting += 1
        self.control.record_sent()
        self._free_at = max(self._free_at, self._env.now) + packet.size / self.spec.bandwidth
        after(self._env, self._free_at - self._env.now, lambda: self._sent(packet))

    def signal(self, act: Callable[[], None]) -> None:
        """Send a signal from the receiver to the sender, which calls ``act`` after the delay."""
        after(self._env, self.spec.delay, act)

    def _sent(self, packet: Packet) -> None:
        self._waiting -= 1
        after(self._env, self.spec.delay, lambda: self.target.arrive(packet, self))
        self.source.wake()


class SimNode:
    """A queue, one worker and outgoing links. A source produces packets instead of receiving them; a sink has no
    links."""

    def __init__(self, env: simpy.Environment, spec: NodeSpec) -> None:
        self.spec = spec
        self.links: dict[str, SimLink] = {}
        self.senders = 0
        self.bytes_in = self.bytes_out = 0.0
        """MB received and sent so far."""
        self.peak = 0
        """The longest queue so far."""
        self.held_up = 0.0
        """Seconds it had a packet that it could not send."""
        self.router: Callable[[Packet], SimLink] = lambda packet: next(iter(self.links.values()))
        self.on_queue: list[Callable[[], None]] = []
        """Called after each change of the queue's length."""
        self.on_sent: Callable[[Packet, SimLink], None] = lambda packet, link: None
        self.on_done: Callable[[Packet], None] = lambda packet: None
        """Called for each packet that leaves the network here."""
        self._env = env
        self._queue: deque[tuple[Packet, SimLink]] = deque()
        self._arrived: deque[tuple[Packet, SimLink]] = deque()
        self._making: Iterator[Packet] | None = None
        self._working = False
        self._held: tuple[Packet, float] | None = None

    @property
    def length(self) -> int:
        return len(self._queue)

    @property
    def queue_use(self) -> float:
        return len(self._queue) / self.spec.queue

    def produce(self, packets: Iterable[Packet]) -> None:
        """Make the node a source. It produces packets at their own pace, but none while one cannot be sent (*Sun
        2022*, section 3.1)."""
        self._making = iter(packets)
        self._next_packet()

    def arrive(self, packet: Packet, link: SimLink) -> None:
        """Called by a link that has delivered a packet. The packet enters the queue when there is room."""
        self._arrived.append((packet, link))
        self._admit()
        if not self._working:
            self._next_packet()

    def wake(self) -> None:
        """Called when a link, its control or a route has changed: a waiting packet is routed again."""
        if self._held:
            self._try_to_send()

    def _admit(self) -> None:
        while self._arrived and len(self._queue) < self.spec.queue:
            packet, link = self._arrived.popleft()
            self._queue.append((packet, link))
            self.bytes_in += packet.size
            self._queue_changed()

    def _next_packet(self) -> None:
        """Produce the next packet or take it from the queue."""
        if self._making:
            packet = next(self._making, None)
            if packet:
                after(self._env, packet.gap, lambda made=packet: self._pass_packet_on(made))  # type: ignore[misc]
            return
        self._working = bool(self._queue)
        if self._working:
            packet, link = self._queue.popleft()
            link.taken += 1
            self._queue_changed()
            self._admit()
            after(self._env, packet.size / self.spec.speed, lambda: self._pass_packet_on(packet))

    def _pass_packet_on(self, packet: Packet) -> None:
        if self.links:
            self._held = packet, self._env.now
            self._try_to_send()
        else:
            self._done(packet)
            self.on_done(packet)

    def _try_to_send(self) -> None:
        assert self._held
        packet, since = self._held
        link = self.router(packet)
        if link.ready:
            self._held = None
            self.held_up += self._env.now - since
            link.send(packet)
            self.on_sent(packet, link)
            self._done(packet)

    def _done(self, packet: Packet) -> None:
        self.bytes_out += packet.size
        self._next_packet()

    def _queue_changed(self) -> None:
        self.peak = max(self.peak, len(self._queue))
        for call in self.on_queue:
            call()


class SimNetwork:
    """Nodes and links by name."""

    def __init__(self, env: simpy.Environment, nodes: Iterable[NodeSpec], links: Iterable[LinkSpec]) -> None:
        self.nodes: Mapping[str, SimNode] = {spec.name: SimNode(env, spec) for spec in nodes}
        self.links: list[SimLink] = []
        for spec in links:
            link = SimLink(env, spec, self.nodes[spec.source], self.nodes[spec.target])
            link.source.links[spec.target] = link
            link.target.senders += 1
            self.links.append(link)

    def paths(self, source: str, sink: str) -> dict[str, list[SimLink]]:
        """The paths from a branching point to the sink, by the name of their first node. Paths do not branch."""
        found = {}
        for name, link in self.nodes[source].links.items():
            path = [link]
            while path[-1].spec.target != sink:
                (onward,) = path[-1].target.links.values()
                path.append(onward)
            found[name] = path
        return found
