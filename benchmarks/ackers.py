"""Several ackers: the tallies of a word count, made by the code of the workers at the rate at which one acker is
saturated, are sent over sockets to 1, 2 and 4 acker processes. Also the memory of an open root."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import selectors
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np

from benchmarks.harness import Results, median, say
from penstock.acking.ids import edges_of_roots, new_seed, roots
from penstock.acking.ledger import Acker, pack, unpack
from penstock.acking.lineage import Entries, Lineage, of_groups
from penstock.clock import SimulatedClock
from penstock.protocol import codec, wire
from penstock.protocol.client import connect, framed
from penstock.protocol.commands import RootsSettled
from penstock.protocol.events import AckerReport, AckerStarted, AckTally, JoinAcker, SpoutProgress
from penstock.protocol.server import ClientGate, listen, read_event
from penstock.worker.acker_process import AckerSpec
from penstock.worker.ackers import start_process
from penstock.worker.tracking import AckCollector, Tracker

COUNTS = (1, 2, 4)  # ackers
SPOUTS, SPLITS, COUNTERS = (1, 2), 4, 4
"""Spout tasks, and the workers of the two bolts."""
FRAME = 200  # sentences
WORDS = 4  # words of a sentence, each for any of the counters
PENDING = 50_000  # roots of a spout task in flight: the default
TURN = 0.0045  # seconds between two tallies of a busy worker, a little more than its pause
IN_FLIGHT = 16  # turns whose roots are in flight: as many as needed for the rate at which one acker is saturated
TURNS = 80
FIRST_RATE = 2_000_000.0  # roots per second; the first guess of that rate
KEY = 0xFEED_5EED


def measure_ackers(results: Results, options: argparse.Namespace) -> None:
    """The rate at which one acker is saturated determines how many roots are in a tally. With it, the CPU time of
    the acker that works most is compared."""
    repeats = options.repeats or (3 if options.quick else 9)
    rate = FIRST_RATE
    for _ in range(2):
        rate = feed(Workload(TURNS, rate), 1).per_core_second
    say(f"  one acker is saturated at {rate:,.0f} roots/s")
    workload = Workload(TURNS, rate)
    runs: dict[int, list[Fed]] = defaultdict(list)
    for number in range(repeats):
        for ackers in COUNTS:
            runs[ackers].append(feed(workload, ackers))
            say(f"  repeat {number + 1}, {ackers} ackers: {runs[ackers][-1].per_core_second:,.0f} roots/core s")
    for ackers, fed in runs.items():
        results.row(
            what=f"{ackers} acker process{'es' if ackers > 1 else ''}",
            roots=fed[0].roots,
            entries_per_root=median([each.entries / each.roots for each in fed]),
            messages=median([each.messages for each in fed]),
            roots_per_s=median([each.rate for each in fed]),
            roots_per_core_s=median([each.per_core_second for each in fed]),
            entries_per_core_s=median([each.entries_per_core_second for each in fed]),
            busiest=median([max(each.cpu) / sum(each.cpu) for each in fed]),
            repeats=" ".join(f"{each.per_core_second / 1e6:.2f}" for each in fed),
        )
    for ackers in COUNTS[1:]:
        ratios = [
            more.per_core_second / one.per_core_second for one, more in zip(runs[1], runs[ackers], strict=True)
        ]
        name = "ackers.scale" if ackers == COUNTS[-1] else f"ackers.scale.{ackers}"
        results.bar(name, median(ratios), f"× roots per CPU second of the busiest of {ackers} ackers, against 1")
    saturated = median([each.per_core_second for each in runs[1]])
    results.bar("ackers.saturated_at", saturated, "roots per second, one acker with a core of its own")
    _measure_memory(results)


# ---- tallies -------------------------------------------------------------------------------------------


class Workload:
    """What the workers of the bolts enter into their tallies, turn by turn. A spout enters nothing, because each
    of its tuples is sent once."""

    def __init__(self, turns: int, rate: float) -> None:
        """The roots that spouts emit in so many turns, at this rate."""
        share = max(1, int(rate * TURN / len(SPOUTS)))
        self.count = count = turns * share * len(SPOUTS)
        self.in_flight = max(PENDING, IN_FLIGHT * share) * len(SPOUTS)
        draw = np.random.default_rng(1)
        self.turns: list[list[list[Entries]]] = []
        """For each turn and worker the entries."""
        self.emitted: list[int] = []
        """The roots that the spouts have emitted at each turn, all together."""
        targets = itertools.cycle(range(SPLITS))
        late: list[list[list[Entries]]] = [[[] for _ in range(COUNTERS)]] * 2
        for first in range(0, turns * share, share):
            splits: list[list[Entries]] = [[] for _ in range(SPLITS)]
            counters: list[list[Entries]] = [[] for _ in range(COUNTERS)]
            for task in SPOUTS:
                for begin in range(first, first + share, FRAME):
                    arrived = _from_spout(task, begin, min(FRAME, first + share - begin))
                    mine = splits[next(targets)]
                    mine.append(arrived.entries())
                    for counter, sent in _to_counters(arrived, draw):
                        mine.append(sent.entries())
                        counters[counter].append(sent.entries())
            self.turns.append([*splits, *late[0]])
            late = [late[1], counters]
            self.emitted.append((first + share) * len(SPOUTS))
        nothing: list[list[Entries]] = [[] for _ in range(SPLITS)]
        self.turns += [[*nothing, *each] for each in late]
        self.emitted += [count] * 2

    def messages(self, ackers: int) -> list[list[tuple[int, int, bytes]]]:
        """What the workers send, turn by turn: triples of worker, acker and message."""
        workers = [BusyWorker(ackers) for _ in range(SPLITS + COUNTERS)]
        return [
            [(number, *each) for number, worker in enumerate(workers) for each in worker.turn(turn[number], last)]
            for turn, last in zip(self.turns, [False] * (len(self.turns) - 1) + [True], strict=True)
        ]


class BusyWorker:
    """A worker that is never idle: the production code from its tally to its messages."""

    def __init__(self, ackers: int) -> None:
        self._clock, self._tracker = SimulatedClock(), Tracker(KEY, "bolt")
        self._acks = AckCollector(self._clock, ackers)
        executor = SimpleNamespace(tracker=self._tracker, waiting=lambda: 0)
        self._tasks: Any = SimpleNamespace(flights=None, inside_tracker=None, all=[executor], busy=True)

    def turn(self, entries: Sequence[Entries], last: bool) -> Iterator[tuple[int, bytes]]:
        self._clock.advance(TURN)
        for each in entries:
            self._tracker.tally.add(each)
        for event in self._acks.collect(self._tasks, everything=last):
            assert isinstance(event, AckTally)
            yield event.acker, framed(event)


def _from_spout(task: int, first: int, rows: int) -> Lineage:
    """A frame of sentences."""
    numbers, own = roots(task, first, rows), np.arange(rows)
    return Lineage(own + 1, edges_of_roots(KEY, numbers), numbers, np.ones(rows, np.int64), own)


def _to_counters(arrived: Lineage, draw: np.random.Generator) -> Iterator[tuple[int, Lineage]]:
    """The frames with the words of these sentences."""
    targets = draw.integers(COUNTERS, size=(arrived.rows, WORDS))
    for counter in range(COUNTERS):
        sentences = np.flatnonzero((targets == counter).any(axis=1))
        if len(sentences):
            yield counter, of_groups(arrived, sentences).lineage(new_seed())


# ---- acker processes -----------------------------------------------------------------------------------


@dataclass
class Fed:
    """What one run has cost. ``cpu``: seconds of each acker."""

    roots: int
    entries: int
    messages: int
    seconds: float
    cpu: list[float]

    @property
    def rate(self) -> float:
        return self.roots / self.seconds

    @property
    def per_core_second(self) -> float:
        """Roots that all ackers settle while the busiest of them uses a second of CPU."""
        return self.roots / max(self.cpu)

    @property
    def entries_per_core_second(self) -> float:
        return self.entries / sum(self.cpu)


def feed(workload: Workload, ackers: int) -> Fed:
    """Send the messages of the workload to so many acker processes, with a bounded number of open roots, until all
    roots are settled. The first tenth is not counted."""
    turns = workload.messages(ackers)
    warm = len(turns) // 10  # turns until the rings have grown and all code has run once
    with_spouts = SpoutProgress(dict.fromkeys(SPOUTS, 0))
    with Processes(ackers) as processes:
        connections = [[processes.join(acker) for acker in range(ackers)] for _ in range(SPLITS + COUNTERS)]
        spouts = [processes.join(acker) for acker in range(ackers)]
        for connection in spouts:
            connection.sendall(framed(with_spouts))
        settled = Settled(spouts)
        for number, (messages, emitted) in enumerate(zip(turns, workload.emitted, strict=True)):
            if number == warm:
                before, first, begun = processes.reports(), settled.count, time.perf_counter()
            settled.wait_for(emitted - workload.in_flight)
            for worker, acker, data in messages:
                connections[worker][acker].sendall(data)
        settled.wait_for(workload.count)
        seconds = time.perf_counter() - begun
        after = processes.reports()
    entries = sum(late.entries - early.entries for early, late in zip(before, after, strict=True))
    cpu = [late.cpu - early.cpu for early, late in zip(before, after, strict=True)]
    return Fed(workload.count - first, entries, sum(map(len, turns[warm:])), seconds, cpu)


class Settled:
    """Counts what ackers tell the spouts."""

    def __init__(self, connections: Sequence[socket.socket]) -> None:
        self.count = 0
        self._selector = selectors.DefaultSelector()
        for connection in connections:
            self._selector.register(connection, selectors.EVENT_READ, bytearray())

    def wait_for(self, count: int) -> None:
        """Return when so many roots are settled."""
        while self.count < count:
            found = self._selector.select(60)
            if not found:
                raise SystemExit(f"only {self.count:,} of {count:,} roots are settled")
            for key, _ in found:
                connection = key.fileobj
                assert isinstance(connection, socket.socket)
                key.data.extend(connection.recv(1 << 18))
                self._take(key.data)

    def _take(self, data: bytearray) -> None:
        size = wire.LENGTH.size
        while len(data) >= size and len(data) >= size + (length := wire.length_of(bytes(data[:size]))):
            command = codec.decode_command(bytes(data[size : size + length]))
            del data[: size + length]
            assert isinstance(command, RootsSettled)
            assert not command.error
            self.count += int(np.frombuffer(command.data, np.int64).reshape(2, -1)[1].sum())


@dataclass
class Processes:
    """Acker processes, and the driver's end of their connections."""

    count: int
    _secret: bytes = field(default_factory=wire.new_secret)
    _started: dict[int, AckerStarted] = field(default_factory=dict)
    _reports: dict[int, list[AckerReport]] = field(default_factory=lambda: defaultdict(list))
    _arrived: threading.Condition = field(default_factory=threading.Condition)
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.new_event_loop)

    def __enter__(self) -> Processes:
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._gate = ClientGate(self._secret)
        listening = asyncio.run_coroutine_threadsafe(listen("127.0.0.1", 0, self._serve), self._loop)
        address = listening.result().sockets[0].getsockname()[:2]
        spec = AckerSpec(address, self._secret, 0, KEY, "127.0.0.1", "here", 0.05, count=self.count)
        self._processes = [
            start_process(msgspec.structs.replace(spec, acker=acker, incarnation=1)) for acker in range(self.count)
        ]
        with self._arrived:
            if not self._arrived.wait_for(lambda: len(self._started) == self.count, 60):
                raise SystemExit("the acker processes do not start")
        return self

    def __exit__(self, *args: object) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
        self._loop.call_soon_threadsafe(self._loop.stop)

    def join(self, acker: int) -> socket.socket:
        """A worker's connection to an acker."""
        started = self._started[acker]
        connection, _ = connect((started.host, started.port), self._secret)
        connection.settimeout(None)
        connection.sendall(framed(JoinAcker(0, acker, 1)))
        return connection

    def reports(self) -> list[AckerReport]:
        """A report of each acker that is made from now on."""
        with self._arrived:
            seen = {acker: len(self._reports[acker]) for acker in range(self.count)}
            new = self._arrived.wait_for(
                lambda: all(len(self._reports[acker]) >= seen[acker] + 2 for acker in seen), 60
            )
            if not new:
                raise SystemExit("the acker processes do not report")
            return [self._reports[acker][-1] for acker in range(self.count)]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._gate.shake_hands(reader, writer)
        started = await read_event(reader)
        assert isinstance(started, AckerStarted)
        with self._arrived:
            self._started[started.acker] = started
            self._arrived.notify_all()
        while True:
            try:
                report = await read_event(reader)
            except (asyncio.IncompleteReadError, OSError):
                return
            assert isinstance(report, AckerReport)
            with self._arrived:
                self._reports[started.acker].append(report)
                self._arrived.notify_all()


# ---- memory --------------------------------------------------------------------------------------------


def _measure_memory(results: Results) -> None:
    """The memory of an open root: in the ledgers, for some numbers of roots in flight, and of a process."""
    for count in (PENDING, 1 << 16, (1 << 16) + 1, 1_000_000):
        acker = Acker(KEY)
        acker.apply(*unpack(pack([_opened(SPOUTS[0], 0, count)])))
        assert acker.open_roots == count
        each = acker.ledger_bytes / count
        results.row(what=f"ledgers of {count:,} open roots", bytes_per_root=each)
        if count == PENDING:
            results.bar(
                "acker.bytes_per_root", each, "bytes of ledger, 50,000 open roots of a spout task (the default)"
            )
    with Processes(1) as processes:
        connection, count = processes.join(0), 1 << 20
        (before,) = processes.reports()
        for first in range(0, count, 1 << 14):
            connection.sendall(framed(AckTally(pack([_opened(SPOUTS[0], first, 1 << 14)]))))
        while (after := processes.reports()[0]).open_roots < count:
            pass
    results.row(
        what=f"process with {count:,} open roots", bytes_per_root=(after.rss - before.rss) / count, rss=after.rss
    )


def _opened(task: int, first: int, count: int) -> Entries:
    """An entry for each of these roots, which completes none."""
    numbers = roots(task, first, count)
    return Entries(numbers, np.ones(count, np.int64), np.ones(count, np.uint64))
