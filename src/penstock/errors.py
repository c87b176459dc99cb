"""The exception tree. Every error has four parts: where, the rule, what came instead, the way out.

All of them survive pickling (their parts are the exception's ``args``), so an error raised inside a
Spark task reaches the user as it was. ``exit_code`` is what the command line ends with.
"""

from __future__ import annotations

from typing import ClassVar

from penstock.redaction import redacted
from penstock.texts import shortened

_MOST_READ = 100_000
"""Characters of a part in which passwords are looked for. Longer parts are cut twice: a password that the first
cut splits lies in what the second cut leaves out."""


class PenstockError(Exception):
    """Base of everything Penstock raises on purpose. ``got`` is a thing ("; got 7") or a clause that begins with
    "but" (", but it is not installed"). ``penstock.redaction`` hides passwords in all its parts; parts that are
    too long are cut (``penstock.texts``)."""

    exit_code: ClassVar[int] = 1

    def __init__(self, where: str, rule: str, got: str = "", way_out: str = "") -> None:
        where, rule, got, way_out = (
            shortened(redacted(shortened(part, _MOST_READ))) for part in (where, rule, got, way_out)
        )
        super().__init__(where, rule, got, way_out)
        self.where = where
        self.rule = rule
        self.got = got
        self.way_out = way_out

    def __str__(self) -> str:
        text = f"{self.where}: {self.rule}"
        if self.got.startswith("but "):
            text += f", {self.got}"
        elif self.got:
            text += f"; got {self.got}"
        text += "."
        if self.way_out:
            text += f" {self.way_out}"
        return text


class LoadError(PenstockError):
    """A topology file cannot be imported or holds no topology."""

    exit_code = 2


class SettingError(PenstockError):
    """A setting is unknown or its value does not fit."""

    exit_code = 2


class TopologyError(PenstockError):
    """A topology is wrong; raised while it is built, before anything runs."""

    exit_code = 2


class NotRunning(PenstockError):
    """No topology of that name runs here, or more than one."""

    exit_code = 2


class EnvironmentFault(PenstockError):
    """The surroundings lack something: Java, a master, a free port, enough slots."""

    exit_code = 3


class JavaMissing(EnvironmentFault):
    """Spark needs Java 17 or newer and none was found."""


class MasterUnreachable(EnvironmentFault):
    """Spark did not start on the given master."""


class PortInUse(EnvironmentFault):
    """The coordinator cannot listen where it was told to."""


class NotEnoughSlots(EnvironmentFault):
    """The master offers fewer task slots than the topology holds for as long as it runs."""


class SystemAway(EnvironmentFault):
    """Another system did not answer in time. Asking again is right."""


class ComponentError(PenstockError):
    """A component broke its contract; ``where`` names it and the user's line."""

    exit_code = 4


class UserCodeError(ComponentError):
    """User code raised."""


class FieldCountError(ComponentError):
    """A tuple was emitted with another number of values than its stream has fields."""


class FieldTypeError(ComponentError):
    """An emitted value does not fit the declared type of its field."""


class KeyTypeError(ComponentError):
    """A value of a field that tuples are grouped by is of a type that cannot be a key."""


class SinkRefused(ComponentError):
    """Another system did not take what an epoch was to bring it. Starting again may help."""


class SinkBusy(ComponentError):
    """Another system takes nothing just now. Nothing is lost, and asking again is right."""


class FramesLost(ComponentError):
    """Frames between two tasks were lost, doubled or overtaken. Exactly once the topology must start again from
    its last commit."""


class FrameError(PenstockError):
    """Bytes that arrived at a slot are not a frame, or not one it can decode."""

    exit_code = 4


class StateError(PenstockError):
    """State cannot be kept or read back: the disk, the store, or a value that cannot be stored."""

    exit_code = 4


class StateUnavailable(StateError):
    """The state store did not answer, or has no room at the moment. Trying again may help."""


class Superseded(StateError):
    """Another driver has taken over the state directory. This one must not write to it again."""


class StateRemoved(StateError):
    """The state directory was removed or put back to an earlier copy while the topology ran."""


class AlreadyRunning(StateError):
    """A driver that is alive runs the topology on the same state directory."""

    exit_code = 2


class StateMissing(StateError):
    """There is no state where a command was told to find it: a wrong path or name."""

    exit_code = 2


class SnapshotCorrupt(StateError):
    """Stored state is not what was written: a file is missing, cut short or changed."""


class ControlRefused(PenstockError):
    """A control connection did not prove that it knows the run's secret."""

    exit_code = 4


class TopologyFailed(PenstockError):
    """A running topology ended because of an error."""

    exit_code = 4
