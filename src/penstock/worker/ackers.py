"""A slot's part in having several ackers: it starts acker processes when the driver asks for them
(``AckerLauncher``), and keeps a connection to every acker process of the query run (``AckerLinks``)."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import BinaryIO

import msgspec

from penstock.child_process import start_module
from penstock.errors import ControlRefused
from penstock.protocol import codec, wire
from penstock.protocol.client import ControlClient, EventSender, connect, read_message
from penstock.protocol.commands import StartAcker, StopAcker, UseAcker
from penstock.protocol.events import AckerLinked, AckTally, JoinAcker, RootsFailed, SpoutProgress
from penstock.worker.acker_process import AckerSpec

ToAcker = AckTally | RootsFailed | SpoutProgress


class SlotAckers:
    """Both parts, for one slot."""

    def __init__(self, control: ControlClient, spec: AckerSpec) -> None:
        """``spec``: what the acker processes that this slot starts have in common."""
        self.links = AckerLinks(control, spec.secret, spec.attempt)
        self._launcher = AckerLauncher(control, spec)

    def close(self) -> None:
        """Called when the slot ends."""
        self.links.close()
        self._launcher.close()


class AckerLauncher:
    """Starts and kills acker processes. They die with this process, at the latest."""

    def __init__(self, control: ControlClient, spec: AckerSpec) -> None:
        self._spec = spec
        self._lock = threading.Lock()
        self._processes: dict[tuple[int, int], subprocess.Popen[bytes]] = {}
        """By acker and incarnation."""
        self._closed = False
        control.listen(StartAcker, self._start)
        control.listen(StopAcker, self._stop)

    def close(self) -> None:
        """Kill all processes."""
        with self._lock:
            self._closed = True
            processes = list(self._processes.values())
        for process in processes:
            process.kill()

    def _start(self, command: StartAcker) -> None:
        """Called on the receiving thread, which must not wait for a new process."""
        threading.Thread(target=self._run, args=(command,), name="acker-launcher", daemon=True).start()

    def _run(self, command: StartAcker) -> None:
        """Start a process, and wait for its end, so that it does not remain as a zombie."""
        acker, incarnation, count = command.acker, command.incarnation, command.count
        spec = msgspec.structs.replace(self._spec, acker=acker, incarnation=incarnation, count=count)
        key = acker, incarnation
        with self._lock:
            if self._closed:
                return
            try:
                process = self._processes[key] = start_process(spec)
            except OSError as error:  # the driver notices that the acker does not connect, and asks another slot
                print(f"acker {command.acker} cannot be started: {error}", file=sys.stderr)
                return
        process.wait()
        with self._lock:
            del self._processes[key]

    def _stop(self, command: StopAcker) -> None:
        with self._lock:
            process = self._processes.get((command.acker, command.incarnation))
        if process is not None:
            process.kill()


def start_process(spec: AckerSpec) -> subprocess.Popen[bytes]:
    """Start the process of an acker. The specification contains the run's secret."""
    data = wire.framed(msgspec.msgpack.encode(spec))
    return start_module("penstock.worker.acker_process", data, stdout=subprocess.DEVNULL)


class AckerLinks:
    """The slot's connections to acker processes. Without any, everything goes to the driver. What settles roots
    arrives as if the driver had sent it."""

    def __init__(self, control: ControlClient, secret: bytes, attempt: int) -> None:
        self._control, self._secret, self._attempt = control, secret, attempt
        self._links: dict[int, AckerLink] = {}
        self._lock = threading.Lock()
        self._newest: dict[int, int] = {}
        """The newest incarnation of each acker that the driver has named."""
        self._progress: SpoutProgress | None = None
        control.listen(UseAcker, self._use)

    def send(self, event: ToAcker) -> None:
        """Send an event to its acker, or to all. Never blocks. Called by the worker's loop."""
        if isinstance(event, SpoutProgress):
            with self._lock:
                self._progress = event
                links = list(self._links.values())
            for each in links:
                each.sender.send_now(event)
            return
        link = self._links.get(event.acker)
        (self._control if link is None else link.sender).send_now(event)

    def close(self) -> None:
        with self._lock:
            links = list(self._links.values())
        for each in links:
            each.close()

    def _use(self, command: UseAcker) -> None:
        """Called on the receiving thread, which must not wait for a connection."""
        with self._lock:
            self._newest[command.acker] = command.incarnation
        if not command.host:
            self._switch(command, None)
            return
        threading.Thread(target=self._connect, args=(command,), name="acker-connect", daemon=True).start()

    def _connect(self, command: UseAcker) -> None:
        try:
            connection, file = connect((command.host, command.port), self._secret)
        except (OSError, ControlRefused) as error:
            self._tell_problem(command, str(error))
            return
        link = AckerLink(connection, self._control, lambda why: self._tell_problem(command, why))
        link.sender.send(JoinAcker(self._attempt, command.acker, command.incarnation))
        threading.Thread(target=link.receive, args=(file,), name="acker-receive", daemon=True).start()
        self._switch(command, link)

    def _switch(self, command: UseAcker, link: AckerLink | None) -> None:
        """Send to this process from now on; without a link, to the driver."""
        unused = link
        with self._lock:
            current = self._newest[command.acker] == command.incarnation
            if current:
                unused = self._links.get(command.acker)
                if link is None:
                    self._links.pop(command.acker, None)
                else:
                    if self._progress is not None:
                        link.sender.send(self._progress)
                    self._links[command.acker] = link
        if unused is not None:
            unused.close()
        if current:
            self._control.send(AckerLinked(command.acker, command.incarnation))

    def _tell_problem(self, command: UseAcker, problem: str) -> None:
        with self._lock:
            current = self._newest[command.acker] == command.incarnation
        if current:
            self._control.send(AckerLinked(command.acker, command.incarnation, problem))


class AckerLink:
    """One connection to an acker process."""

    def __init__(self, connection: socket.socket, control: ControlClient, on_lost: Callable[[str], None]) -> None:
        """``on_lost`` is called on a thread of the link when the connection has ended, unless ``close`` was
        called."""
        self._control, self._on_lost = control, on_lost
        self._connection = connection
        self._closed = False
        self.sender = EventSender(connection, self._lost, "acker-send")

    def receive(self, file: BinaryIO) -> None:
        """Pass what the acker sends to the worker until the connection ends. Runs on a thread of its own."""
        why = "its connection has ended"
        try:
            while (data := read_message(file)) is not None:
                self._control.receive(codec.decode_command(data))
        except ControlRefused as error:
            why = str(error)
        except (OSError, ValueError):
            pass  # the connection has ended
        self._lost(why)

    def close(self) -> None:
        self._closed = True
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self.sender.close()

    def _lost(self, why: str = "its connection has ended") -> None:
        if not self._closed:
            self._closed = True
            self._on_lost(why)
