"""What a processor is told: enough to work without the topology, also by ``penstock drain`` after it has ended."""

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
_PURPOSE = "persist spec"  # of a signature
LENGTH = struct.Struct("<Q")  # before a specification on a pipe


@dataclass(frozen=True)
class ProcessorSpec:
    """One component's queue, and where it goes."""

    topology: str
    component: str
    queue: PersistentQueue
    store: Store
    folder: str
    """The component's shared folder, for a queue that wants one."""
    dead: str
    """A local folder for dead letters."""
    flush_every: float
    flush_rows: int
    timeout: float
    """Seconds a call of the store may take."""

    @property
    def name(self) -> str:
        """The queue's."""
        return f"{self.topology}/{self.component}"

    def dumps(self) -> bytes:
        """As bytes for ``load``: the signature of a pickle, and the pickle."""
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


def keep(spec: ProcessorSpec) -> None:
    """Leave it where ``find`` looks. It may hold a password: on a local path it is for this user only."""
    path = local(spec.folder)
    if path is None:
        StateStore(spec.folder).write(_SPEC, spec.dumps())
    else:
        make_folders(path)
        replace_file(path / _SPEC, spec.dumps())


def find(state_dir: str, topology: str) -> list[ProcessorSpec]:
    """Of each component of a topology that has, or had, a processor."""
    shared = StateStore(state_dir).child(topology).child("shared")
    return [
        _load_of(shared.read(name), topology, name.removesuffix(f"/{_SPEC}"))
        for name in shared.list()
        if name.endswith(f"/{_SPEC}")
    ]


def kept(folder: str, topology: str, component: str) -> ProcessorSpec | None:
    """The one of a component's shared folder."""
    store = StateStore(folder)
    return _load_of(store.read(_SPEC), topology, component) if _SPEC in store.list() else None


def _load_of(data: bytes, topology: str, component: str) -> ProcessorSpec:
    """As ``load``. A signature shows who wrote it, not for which component: a file that was copied from another
    would empty that one's queue into that one's store."""
    spec = load(data)
    if (spec.topology, spec.component) != (topology, component):
        raise LoadError(
            f"component '{component}' of topology '{topology}'",
            f"its {_SPEC} belongs to '{spec.component}' of topology '{spec.topology}'",
            "Find out who put it there, and remove it. The next start of the topology writes it again.",
        )
    return spec


def load(data: bytes) -> ProcessorSpec:
    """From what ``dumps`` gave. Nothing is unpickled that is not signed with this deployment's key."""
    signature, pickled = data[: signing.SIGNATURE_BYTES], data[signing.SIGNATURE_BYTES :]
    if not signing.is_signed(_PURPOSE, pickled, signature):
        raise LoadError(
            "a PersistBolt's store and queue",
            f"{_SPEC} is signed with another key, or was changed since it was written",
            f"Use the key file of the user who runs the topology (set {signing.KEY_FILE}); "
            f"this one is {signing.key_path()}. If that key is lost, remove the file {_SPEC}; "
            "the next start writes it again.",
        )
    try:
        spec = pickle.loads(pickled)
    except Exception as error:  # whatever a user's class raises while it is built
        raise LoadError(
            "a PersistBolt's store and queue",
            f"they cannot be unpickled here ({type(error).__name__}: {error})",
            "Run this where the topology's modules can be imported.",
        ) from error
    assert isinstance(spec, ProcessorSpec)
    return spec


def local(folder: str) -> Path | None:
    """A folder as a path; None for a URL."""
    path = folder.removeprefix("file://")
    return None if "://" in path else Path(path)
