"""The exception tree: three parts, pickling, exit codes."""

import pickle

import pytest

from penstock import errors
from penstock.errors import PenstockError

KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, PenstockError)]


def test_three_parts_make_a_sentence():
    error = PenstockError("component 'a'", "it has no field", "Name one.")
    assert (error.where, error.problem, error.hint) == ("component 'a'", "it has no field", "Name one.")
    assert str(error) == "component 'a': it has no field. Name one."


@pytest.mark.parametrize(
    ("parts", "text"),
    [
        (("a", "b"), "a: b."),
        (("a", "b", ""), "a: b."),
        (("a", "b", "C."), "a: b. C."),
        (("a", "it ended: no space left."), "a: it ended: no space left."),
        (("a", "is it there?", "C."), "a: is it there? C."),
        (("a", "it is called 'b.'", "C."), "a: it is called 'b.'. C."),
        (("a", "it ended\n", "C."), "a: it ended. C."),
    ],
)
def test_the_text_has_one_full_stop_after_the_problem(parts, text):
    assert str(PenstockError(*parts)) == text


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_kind_survives_pickling(kind):
    error = kind("where", "problem", "Hint.")
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is kind
    assert (back.where, back.problem, back.hint) == ("where", "problem", "Hint.")
    assert str(back) == str(error) == "where: problem. Hint."


def test_the_module_shows_the_tree_of_its_classes():
    tree = errors.__doc__ or ""
    missing = [kind.__name__ for kind in KINDS if f" {kind.__name__}" not in tree]
    assert missing == []


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
