"""The exception tree: four parts, pickling, exit codes."""

import pickle

import pytest

from penstock import errors
from penstock.errors import PenstockError

KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, PenstockError)]


def test_four_parts_make_a_sentence():
    error = PenstockError("component 'a'", "needs a field", "none", "Name one.")
    assert (error.where, error.rule, error.got, error.way_out) == (
        "component 'a'",
        "needs a field",
        "none",
        "Name one.",
    )
    assert str(error) == "component 'a': needs a field; got none. Name one."


@pytest.mark.parametrize(
    ("parts", "text"),
    [
        (("a", "b"), "a: b."),
        (("a", "b", "c"), "a: b; got c."),
        (("a", "b", "but c"), "a: b, but c."),
        (("a", "b", "", "D."), "a: b. D."),
    ],
)
def test_parts_may_be_missing(parts, text):
    assert str(PenstockError(*parts)) == text


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_kind_survives_pickling(kind):
    error = kind("where", "rule", "got", "Way out.")
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is kind
    assert (back.where, back.rule, back.got, back.way_out) == ("where", "rule", "got", "Way out.")
    assert str(back) == str(error) == "where: rule; got got. Way out."


def test_exit_codes():
    codes = {kind.__name__: kind.exit_code for kind in KINDS}
    assert codes == {
        "PenstockError": 1,
        "LoadError": 2,
        "SettingError": 2,
        "TopologyError": 2,
        "NotRunning": 2,
        "EnvironmentFault": 3,
        "JavaMissing": 3,
        "MasterUnreachable": 3,
        "PortInUse": 3,
        "NotEnoughSlots": 3,
        "SystemAway": 3,
        "ComponentError": 4,
        "UserCodeError": 4,
        "FieldCountError": 4,
        "FieldTypeError": 4,
        "KeyTypeError": 4,
        "SinkRefused": 4,
        "SinkBusy": 4,
        "FramesLost": 4,
        "FrameError": 4,
        "ControlRefused": 4,
        "TopologyFailed": 4,
        "StateError": 4,
        "StateUnavailable": 4,
        "Superseded": 4,
        "StateRemoved": 4,
        "AlreadyRunning": 2,
        "StateMissing": 2,
        "SnapshotCorrupt": 4,
    }
