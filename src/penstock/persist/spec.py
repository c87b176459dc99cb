"""What a processor is told: enough to work without the topology, also by ``penstock drain`` after it has ended."""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from penstock.clock import Clock
from penstock.errors import ComponentError
from penstock.persist.letters import DeadRows
from penstock.persist.policy import Flushing
from penstock.persist.processor import Processor
from penstock.persist.queues import Queue
from penstock.persist.stores import Store

DEAD = "dead"
SPEC = "spec.pickle"
LENGTH = struct.Struct("<Q")  # before a specification on a pipe


@dataclass(frozen=True)
class ProcessorSpec:
    """One component's queue, and where it goes."""

    topology: str
    component: str
    queue: Queue
    store: Store
    folder: str
    """The component's shared folder, for a queue that wants one."""
    home: str
    """A local folder for dead letters, and for this."""
    flush_every: float
    flush_rows: int
    timeout: float
    """Seconds a call of the store may take."""

    @property
    def name(self) -> str:
        """The queue's."""
        return f"{self.topology}/{self.component}"

    def dumps(self) -> bytes:
        try:
            return pickle.dumps(self)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ComponentError(
                f"component '{self.component}'",
                "its store and queue travel to the processor's process",
                f"{type(error).__name__}: {error}",
                "Define your own store in a module, not in the file that is run, and connect in open().",
            ) from error

    def processor(self, clock: Clock, crash: Callable[[str], None] = lambda step: None) -> Processor:
        return Processor(
            self.name,
            self.queue.open(self.name, self.folder),
            self.store.open(),
            DeadRows(Path(self.home) / DEAD, self.component),
            Flushing(self.flush_every, self.flush_rows),
            clock,
            crash,
        )


def find(state_dir: str, topology: str) -> list[ProcessorSpec]:
    """Of each component of a topology that has, or had, a processor."""
    folders = sorted(Path(state_dir.removeprefix("file://")).glob(f"*/shared/*/{SPEC}"))
    specs = [load(path.read_bytes()) for path in folders]
    return [spec for spec in specs if spec.topology == topology]


def load(data: bytes) -> ProcessorSpec:
    """From what ``dumps`` gave. Unpickles: the state directory is as trusted as the topology's code."""
    spec = pickle.loads(data)
    assert isinstance(spec, ProcessorSpec)
    return spec
