"""The process of an acker: ``python -m penstock.worker.acker_process``, started by a slot (``worker.ackers``) when
the driver asks for it.

It reads its specification from standard input and tells the driver the address on which it listens. Workers
connect, prove that they know the run's secret, and send what they have emitted, acked and failed; the process
answers the workers of the spouts. It keeps nothing on disk: when it dies, the driver has another one started, and
the spouts emit its open tuples again. It ends when the driver closes its connection, and when standard input ends,
because the slot has died.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
import threading
import time
from collections import defaultdict
from typing import BinaryIO

import msgspec
import numpy as np

from penstock.acking import ledger
from penstock.acking.ledger import Acker
from penstock.acking.lineage import I64
from penstock.acking.spread import AckerShare
from penstock.errors import ControlRefused
from penstock.protocol import codec, wire
from penstock.protocol.client import EventSender, connect
from penstock.protocol.commands import RootsSettled
from penstock.protocol.events import (
    AckerReport,
    AckerStarted,
    AckTally,
    Event,
    JoinAcker,
    RootsFailed,
    SpoutProgress,
)
from penstock.protocol.requests import OperatorRequest
from penstock.protocol.server import ClientGate, listen, read_event, take_events
from penstock.redaction import redact_tracebacks
from penstock.worker.reports import resident_bytes

_CHUNK = 1 << 18
"""Bytes read from a connection at a time, so that a saturated acker reads many messages. What they complete is
sent to the spouts at once."""


class AckerSpec(msgspec.Struct, frozen=True):
    """What the process reads from standard input: the length in four bytes, then this as MessagePack."""

    driver: tuple[str, int]
    secret: bytes
    attempt: int
    key: int
    """``Job.key``."""
    host: str
    """The address to listen on: the one from which its node reaches the driver."""
    node: str
    interval: float
    """Seconds between two reports."""
    acker: int = 0
    incarnation: int = 0
    count: int = 1
    """Number of ackers."""


class AckerServer:
    """The ledgers of one acker, and the connections of the workers. Used on one event loop."""

    def __init__(self, spec: AckerSpec) -> None:
        self.acker = Acker(spec.key, AckerShare(spec.acker, spec.count))
        self._spec, self._gate = spec, ClientGate(spec.secret)
        self._spouts: dict[int, asyncio.StreamWriter] = {}
        """The connection of the worker of each spout task."""
        self._unsent: dict[int, list[bytes]] = defaultdict(list)
        """What is settled of spout tasks whose worker is not connected yet."""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection until it ends."""
        self._gate.receive(writer)
        try:
            await asyncio.wait_for(self._admit(reader, writer), wire.HANDSHAKE_TIMEOUT)
            data = bytearray()
            while chunk := await reader.read(_CHUNK):
                data += chunk
                self.handle(take_events(data), writer)
        except (ControlRefused, TimeoutError) as error:
            print(f"acker {self._spec.acker} refused a connection: {error}", file=sys.stderr)
        except (asyncio.IncompleteReadError, OSError):
            pass  # the connection has ended
        finally:
            self._gate.forget(writer)
            writer.close()

    async def _admit(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._gate.shake_hands(reader, writer)
        first, spec = await read_event(reader), self._spec
        if first != JoinAcker(spec.attempt, spec.acker, spec.incarnation):
            raise ControlRefused("control connection", f"{type(first).__name__} is not meant for this acker")

    def handle(self, events: list[Event | OperatorRequest], writer: asyncio.StreamWriter) -> None:
        """Handle messages of a worker in order, and send what they have settled."""
        complete: dict[int, list[I64]] = defaultdict(list)
        for event in events:
            match event:
                case AckTally():
                    for task, numbers in self.acker.apply(*ledger.unpack(event.data)).items():
                        complete[task].append(numbers)
                case RootsFailed():
                    first, length = np.array(event.first, np.uint64), np.array(event.length, np.int64)
                    for task, numbers in self.acker.close(first, length).items():
                        self._settle(task, numbers, event.component, event.error)
                case SpoutProgress():
                    self._note_spouts(event, writer)
                case _:
                    raise ControlRefused("control connection", f"an acker takes no {type(event).__name__}")
        for task, parts in complete.items():
            self._settle(task, parts[0] if len(parts) == 1 else np.sort(np.concatenate(parts)))

    def report(self) -> AckerReport:
        acker = self.acker
        return AckerReport(acker.open_roots, acker.entries, time.process_time(), resident_bytes())

    def _settle(self, task: int, numbers: I64, component: str = "", error: str = "") -> None:
        data = np.concatenate(ledger.ranges(numbers)).tobytes()
        message = wire.framed(codec.encode(RootsSettled(task, component, error, data)))
        writer = self._spouts.get(task)
        if writer is None:
            self._unsent[task].append(message)
        else:
            writer.write(message)

    def _note_spouts(self, event: SpoutProgress, writer: asyncio.StreamWriter) -> None:
        for task, number in event.settled_below.items():
            self.acker.settled_below(task, number)
            self._spouts[task] = writer
            for message in self._unsent.pop(task, ()):
                writer.write(message)


async def run(spec: AckerSpec, driver: socket.socket) -> None:
    """Accept workers, tell the driver the address, and report until the process ends."""
    server = AckerServer(spec)
    listener = await listen(spec.host, 0, server.serve, _CHUNK)
    port = listener.sockets[0].getsockname()[1]
    reports = EventSender(driver, end, "acker-reports")
    reports.send(AckerStarted(spec.attempt, spec.acker, spec.incarnation, os.getpid(), spec.node, spec.host, port))
    while True:
        await asyncio.sleep(spec.interval)
        reports.send(server.report())


def end() -> None:
    """End the process at once: there is nothing to save."""
    os._exit(0)


def _end_with(file: BinaryIO) -> None:
    """End the process when this connection or pipe ends."""

    def wait() -> None:
        with contextlib.suppress(OSError):
            while file.read(1):
                pass
        end()

    threading.Thread(target=wait, name="acker-end", daemon=True).start()


def main() -> None:
    redact_tracebacks()
    # A thread blocks in read(), and a buffer would have a lock.
    control = open(0, "rb", buffering=0)  # noqa: SIM115
    (length,) = wire.LENGTH.unpack(_read(control, wire.LENGTH.size))
    spec = msgspec.msgpack.decode(_read(control, length), type=AckerSpec)
    _end_with(control)
    driver, file = connect(spec.driver, spec.secret)
    driver.settimeout(None)
    _end_with(file)
    asyncio.run(run(spec, driver))


def _read(control: BinaryIO, size: int) -> bytes:
    data = b""
    while len(data) < size:
        data += control.read(size - len(data)) or sys.exit("penstock.worker.acker_process is started by a slot")
    return data


if __name__ == "__main__":
    main()
