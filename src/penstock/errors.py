"""The errors that Penstock raises on purpose.

    PenstockError
    ├── LoadError               a topology file cannot be imported or holds no topology
    ├── SettingError            a setting is unknown or its value does not fit
    ├── TopologyError           a topology is wrong
    ├── NotRunning              no topology of that name runs here, or more than one
    ├── EnvironmentFault        the environment lacks something
    │   ├── JavaMissing
    │   ├── MasterUnreachable
    │   ├── PortInUse
    │   ├── NotEnoughSlots
    │   └── SystemAway          another system did not answer in time
    ├── ComponentError          a component broke its contract
    │   ├── UserCodeError
    │   ├── FieldCountError
    │   ├── FieldTypeError
    │   ├── KeyTypeError
    │   ├── SinkRefused
    │   ├── SinkBusy
    │   └── FramesLost
    ├── FrameError              bytes are not a frame
    ├── StateError              state cannot be stored or read back
    │   ├── StateUnavailable
    │   ├── Superseded
    │   ├── StateRemoved
    │   ├── AlreadyRunning
    │   ├── StateMissing
    │   └── SnapshotCorrupt
    ├── ControlRefused          a control connection was refused
    └── TopologyFailed          a running topology ended because of an error

An error has three parts: ``where`` it happened, the ``problem``, and a ``hint`` what to do. They are the
exception's ``args``, so an error raised in a Spark task is pickled and reaches the user unchanged. The command
line ends with the error's ``exit_code``.
"""

from __future__ import annotations

from typing import ClassVar

from penstock.redaction import redacted
from penstock.texts import shortened

_MAX_SEARCHED = 100_000
"""Characters of a part that are searched for passwords. A longer part is shortened before and after the search: if
the first shortening splits a password, the second removes both halves."""

_ENDS = (".", "!", "?", "…")


class PenstockError(Exception):
    """Base class of all errors that Penstock raises on purpose.

    ``problem`` is one clause that states what is wrong and contains the offending value, without a full stop: "it
    reads from 'lnog', which does not exist". ``hint`` is a sentence that says what to do: "Did you mean 'long'?"
    Passwords are hidden in all parts (``penstock.redaction``), and long parts are shortened (``penstock.texts``).
    """

    exit_code: ClassVar[int] = 1

    def __init__(self, where: str, problem: str, hint: str = "") -> None:
        where, problem, hint = (
            shortened(redacted(shortened(part, _MAX_SEARCHED))) for part in (where, problem, hint)
        )
        super().__init__(where, problem, hint)
        self.where = where
        self.problem = problem
        self.hint = hint

    def __str__(self) -> str:
        problem = self.problem.rstrip()
        text = f"{self.where}: {problem}" + ("" if problem.endswith(_ENDS) else ".")
        return f"{text} {self.hint}" if self.hint else text


class LoadError(PenstockError):
    """A topology file cannot be imported or holds no topology."""

    exit_code = 2


class SettingError(PenstockError):
    """A setting is unknown or its value does not fit."""

    exit_code = 2


class TopologyError(PenstockError):
    """A topology is wrong. Raised while it is built, before anything runs."""

    exit_code = 2


class NotRunning(PenstockError):
    """No topology of that name runs here, or more than one."""

    exit_code = 2


class EnvironmentFault(PenstockError):
    """The environment lacks something: Java, a master, a free port, enough task slots."""

    exit_code = 3


class JavaMissing(EnvironmentFault):
    """Spark needs Java 17 or newer and none was found."""


class MasterUnreachable(EnvironmentFault):
    """Spark did not start on the given master."""


class PortInUse(EnvironmentFault):
    """The driver or the HTTP endpoint cannot listen on the given port."""


class NotEnoughSlots(EnvironmentFault):
    """The master offers fewer task slots than the topology needs."""


class SystemAway(EnvironmentFault):
    """Another system did not answer in time. The request can be repeated."""


class ComponentError(PenstockError):
    """A component broke its contract. ``where`` names the component and the user's line."""

    exit_code = 4


class UserCodeError(ComponentError):
    """User code raised an exception."""


class FieldCountError(ComponentError):
    """A tuple was emitted with more or fewer values than its stream has fields."""


class FieldTypeError(ComponentError):
    """An emitted value does not fit the declared type of its field."""


class KeyTypeError(ComponentError):
    """A value of a field that tuples are grouped by has a type that cannot be a key."""


class SinkRefused(ComponentError):
    """Another system rejected what an epoch was to write. Restarting the topology may help."""


class SinkBusy(ComponentError):
    """Another system accepts nothing at the moment. Nothing is lost, and the request can be repeated."""


class FramesLost(ComponentError):
    """Frames between two tasks were lost, duplicated or reordered. With exactly-once delivery the topology must
    restart from its last commit."""


class FrameError(PenstockError):
    """Bytes that arrived at a worker are not a frame, or cannot be decoded."""

    exit_code = 4


class StateError(PenstockError):
    """State cannot be stored or read back: because of the disk, the store, or a value that cannot be stored."""

    exit_code = 4


class StateUnavailable(StateError):
    """The state store did not answer, or has no space at the moment. The request can be repeated."""


class Superseded(StateError):
    """Another driver has taken over the state directory. This driver must not write to it again."""


class StateRemoved(StateError):
    """The state directory was removed or replaced by an earlier copy while the topology ran."""


class AlreadyRunning(StateError):
    """Another live driver runs the topology with the same state directory."""

    exit_code = 2


class StateMissing(StateError):
    """A command found no state under the given path and name."""

    exit_code = 2


class SnapshotCorrupt(StateError):
    """Stored state is not what was written: a file is missing, truncated or changed."""


class ControlRefused(PenstockError):
    """A control connection was refused: its other end does not know the secret of this run or the protocol."""

    exit_code = 4


class TopologyFailed(PenstockError):
    """A running topology ended because of an error."""

    exit_code = 4
