"""The specification of a processor: all it needs to work without the topology, also for ``penstock drain``."""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from penstock import signing
from penstock.clock import Clock
from penstock.errors import ComponentError, LoadError
from penstock.persist.dead_letters import DeadLetterRows
from penstock.persist.policy import Flushing
from penstock.persist.processor import Processor
from penstock.persist.queues import PersistentQueue
from penstock.persist.stores import Store
from penstock.private_folder import make_folders
from penstock.state.store import StateStore
from penstock.storage.segments import replace_file

_SPEC = "spec.pickle"
_PURPOSE = "persist spec"  # part of what is signed, so that a signature is valid for this purpose only
LENGTH = struct.Struct("<Q")  # the length that precedes a specification on a pipe


@dataclass(frozen=True)
class ProcessorSpec:
    """The queue of one component, its store, and its settings. Pickled for the processor's process."""

    topology: str
    component: str
    queue: PersistentQueue
    store: Store
    folder: str
    """The component's shared folder, for a queue that needs one."""
    dead: str
    """A local folder for dead letters."""
    flush_every: float
    flush_rows: int
    timeout: float
    """Seconds that a call of the store may take."""

    @property
    def name(self) -> str:
        """The name of the queue."""
        return f"{self.topology}/{self.component}"

    def dumps(self) -> bytes:
        """The signed pickle that ``load`` reads. Raises ``ComponentError`` if the store or queue cannot be
        pickled."""
        try:
            pickled = pickle.dumps(self)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ComponentError(
                f"component '{self.component}'",
                "its store and queue cannot be pickled for the processor's process "
                f"({type(error).__name__}: {error})",
                "Define your own store in a module, not in the file that is run, and connect in open().",
            ) from error
        return signing.sign(_PURPOSE, pickled) + pickled

    def processor(self, clock: Clock, crash: Callable[[str], None] = lambda step: None) -> Processor:
        return Processor(
            self.name,
            self.queue.open(self.name, self.folder),
            self.store.open(),
            DeadLetterRows(Path(self.dead), self.component),
            Flushing(self.flush_every, self.flush_rows),
            clock,
            crash,
        )


def save(spec: ProcessorSpec) -> None:
    """Store the specification where ``find`` looks. It may contain a password, so a local file is readable only by
    this user."""
    path = local_path(spec.folder)
    if path is None:
        StateStore(spec.folder).write(_SPEC, spec.dumps())
    else:
        make_folders(path)
        replace_file(path / _SPEC, spec.dumps())


def find(state_dir: str, topology: str) -> list[ProcessorSpec]:
    """The specification of each component of a topology that has or had a processor."""
    shared = StateStore(state_dir).child(topology).child("shared")
    return [
        _load_of(shared.read(name), topology, name.removesuffix(f"/{_SPEC}"))
        for name in shared.list()
        if name.endswith(f"/{_SPEC}")
    ]


def load_from_folder(folder: str, topology: str, component: str) -> ProcessorSpec | None:
    """The specification in a component's shared folder; None if there is none."""
    store = StateStore(folder)
    return _load_of(store.read(_SPEC), topology, component) if _SPEC in store.list() else None


def _load_of(data: bytes, topology: str, component: str) -> ProcessorSpec:
    """Like ``load``, and checks the component. The signature shows who wrote the file, not for which component: a
    file copied from another component would move that component's queue to that component's store."""
    spec = load(data)
    if (spec.topology, spec.component) != (topology, component):
        raise LoadError(
            f"component '{component}' of topology '{topology}'",
            f"its {_SPEC} belongs to '{spec.component}' of topology '{spec.topology}'",
            "Find out who put it there, and remove it. The next run of the topology writes it again.",
        )
    return spec


def load(data: bytes) -> ProcessorSpec:
    """The specification that ``dumps`` encoded. Nothing is unpickled unless it is signed with this deployment's
    key; otherwise raises ``LoadError``."""
    signature, pickled = data[: signing.SIGNATURE_BYTES], data[signing.SIGNATURE_BYTES :]
    if not signing.is_signed(_PURPOSE, pickled, signature):
        raise LoadError(
            "a PersistBolt's store and queue",
            f"{_SPEC} is signed with another key, or was changed since it was written",
            f"Use the key file of the user who runs the topology (set {signing.KEY_FILE}); "
            f"this one is {signing.key_path()}. If that key is lost, remove the file {_SPEC}; "
            "the next run writes it again.",
        )
    try:
        spec = pickle.loads(pickled)
    except Exception as error:  # users' classes may raise anything
        raise LoadError(
            "a PersistBolt's store and queue",
            f"they cannot be unpickled here ({type(error).__name__}: {error})",
            "Run this where the topology's modules can be imported.",
        ) from error
    assert isinstance(spec, ProcessorSpec)
    return spec


def local_path(folder: str) -> Path | None:
    """The folder as a path; None for a URL."""
    path = folder.removeprefix("file://")
    return None if "://" in path else Path(path)
