"""Finds the topology in a user's file, given as ``FILE`` or ``FILE:OBJECT``."""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from penstock.errors import LoadError, PenstockError
from penstock.interrupts import Interrupted
from penstock.settings import Settings
from penstock.topology.builder import Topology, TopologyBuilder

_LISTED = 5  # at most so many files of a folder are named in an error message
_HINT = "Write topology = builder.build('name') in the file, or name an object with FILE:OBJECT."


def load_topology(target: str) -> Topology:
    """Import the file and return its topology: the named object, or the object named ``topology``, or the only
    topology in the file. If the object is a function, its result is used. Raises ``LoadError``, or the
    ``TopologyError`` of an invalid topology."""
    path, name = split_target(target)
    module = _import(path)
    found = _named(module, name) if name else _only(module)
    try:
        made = found() if callable(found) else found
    except PenstockError:
        raise
    except Interrupted:
        raise
    except BaseException as error:  # the user's function may raise anything, sys.exit() included
        raise _blame(path, error) from error
    if isinstance(made, TopologyBuilder):
        made = made.build(path.stem)
    if not isinstance(made, Topology):
        raise LoadError(target, f"{made!r} is neither a topology nor a function that returns one", _HINT)
    return made


def with_settings(topology: Topology, assignments: Sequence[str]) -> Topology:
    """The topology with the settings of the command line, given as ``NAME=VALUE``."""
    return dataclasses.replace(topology, settings=Settings.parse(assignments, base=topology.settings))


def split_target(target: str) -> tuple[Path, str]:
    """The file, and the object's name or an empty string if the target names none."""
    path, _, name = (target, "", "") if Path(target).exists() else target.partition(":")
    return Path(path), name


def load_again(target: str) -> Topology:
    """Load the target again: the file and all modules of the user are imported anew. If that fails, the modules
    loaded before stay in use."""
    from penstock.spark.shipping import own_modules

    before = {module.__name__: module for module in own_modules()}
    for name in before:
        sys.modules.pop(name, None)
    importlib.invalidate_caches()
    try:
        return load_topology(target)
    except BaseException:
        sys.modules.update(before)
        raise


def _import(path: Path) -> ModuleType:
    if path.is_dir():
        files = sorted(each.name for each in path.glob("*.py"))
        raise LoadError(
            str(path),
            "it is a folder"
            + (f" with {_listed(files)}" if files else " without Python files")
            + ", not a Python file",
            f"Name one of its files, for example {path / files[0]}." if files else "",
        )
    if not path.is_file():
        near = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*.py")], 1)
        raise LoadError(
            str(path), "there is no such file", f"Did you mean {path.parent / near[0]}?" if near else ""
        )
    # As when Python runs the file, its folder is searched first, so that it can import modules beside it.
    sys.path.insert(0, str(path.resolve().parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise LoadError(
            str(path),
            f"it is not a Python file: its name ends with {path.suffix}"
            if path.suffix
            else "it is not a Python file: its name has no suffix",
            "Name it something.py.",
        )
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    try:
        spec.loader.exec_module(module)
    except PenstockError:
        raise
    except SyntaxError as error:
        raise LoadError(
            f"{error.filename or path}:{error.lineno}", f"it is not valid Python ({error.msg})"
        ) from error
    except Interrupted:
        raise
    except BaseException as error:  # a user's file may raise anything, sys.exit() included
        raise _blame(path, error) from error
    return module


def _blame(path: Path, error: BaseException) -> LoadError:
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if Path(f.filename) == path.resolve()]
    lines = lines or [
        f.lineno for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).name == path.name
    ]
    where = f"{path}:{lines[-1]}" if lines else str(path)
    hint = ""
    if isinstance(error, ModuleNotFoundError):
        hint = f"Install {error.name}, or put it in the file's folder."
    if isinstance(error, AttributeError) and error.name:
        near = difflib.get_close_matches(error.name, [each for each in dir(error.obj) if each[0] != "_"], 1)
        hint = f"Did you mean {near[0]}?" if near else ""
    if isinstance(error, SystemExit):
        hint = "Put the statements that run the file as a program under: if __name__ == '__main__'."
    return LoadError(where, f"the file cannot be imported ({type(error).__name__}: {error})", hint)


def _listed(files: list[str]) -> str:
    more = len(files) - _LISTED
    return ", ".join(files[:_LISTED]) + (f" and {more} more" if more > 0 else "")


def _named(module: ModuleType, name: str) -> Any:
    try:
        return getattr(module, name)
    except AttributeError:
        near = difflib.get_close_matches(name, vars(module), 1)
        raise LoadError(
            f"{module.__file__}", f"it has no object '{name}'", f"Did you mean {near[0]}?" if near else _HINT
        ) from None


def _only(module: ModuleType) -> Any:
    if hasattr(module, "topology"):
        return module.topology
    found = {name: value for name, value in vars(module).items() if isinstance(value, Topology)}
    if len(found) == 1:
        return next(iter(found.values()))
    holds = f"{len(found)}: {', '.join(found)}" if found else "none"
    raise LoadError(f"{module.__file__}", f"it must contain one topology, but it contains {holds}", _HINT)
