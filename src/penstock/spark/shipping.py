"""Packs Penstock and the user's modules into zip files for the nodes, with compiled modules, so that workers start
quickly."""

from __future__ import annotations

import hashlib
import os
import py_compile
import site
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from types import ModuleType

import penstock

PENSTOCK_ZIP = "penstock.zip"


def penstock_zip(folder: Path) -> Path:
    """Write Penstock itself to a zip file in ``folder`` that Python can import from, and return its path."""
    root = Path(penstock.__file__).parent
    path = folder / PENSTOCK_ZIP
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in sorted(root.rglob("*")):
            if file.is_file() and "__pycache__" not in file.parts:
                _add(archive, file, str(Path("penstock") / file.relative_to(root)))
    return path


def user_zip(folder: Path, modules: Iterable[ModuleType] | None = None) -> Path | None:
    """Write the user's modules to one zip file in ``folder``, and return its path. None if there are no such
    modules. Without ``modules`` it takes all loaded ones.

    The file name contains a hash of the content, because Spark does not replace a file of the same name.
    """
    files: dict[str, Path] = {}
    for module in own_modules() if modules is None else modules:
        path = _source(module)
        if path is not None:
            inside = module.__name__.replace(".", "/")
            files[f"{inside}/__init__.py" if path.name == "__init__.py" else f"{inside}.py"] = path
    if not files:
        return None
    digest = hashlib.sha256()
    for name in sorted(files):
        digest.update(name.encode() + files[name].read_bytes())
    target = folder / f"topology-{digest.hexdigest()[:16]}.zip"
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in sorted(files):
            _add(archive, files[name], name)
        for package in {str(parent) for name in files for parent in Path(name).parents if str(parent) != "."}:
            if f"{package}/__init__.py" not in files:
                archive.writestr(f"{package}/__init__.py", "")
    return target


def _add(archive: zipfile.ZipFile, file: Path, name: str) -> None:
    """Add a file and its compiled form. A node with another version of Python uses the source."""
    archive.write(file, name)
    if file.suffix == ".py":
        with tempfile.TemporaryDirectory() as folder:
            compiled = Path(folder) / "module.pyc"
            mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
            py_compile.compile(str(file), str(compiled), doraise=True, invalidation_mode=mode)
            archive.write(compiled, f"{name}c")


def own_modules() -> list[ModuleType]:
    """Return the user's modules among all loaded ones. Installed modules are left out, since the nodes must have
    them, and so is ``__main__``, whose classes are pickled by value."""
    return [module for module in list(sys.modules.values()) if _source(module) is not None]


def _source(module: ModuleType) -> Path | None:
    source = getattr(module, "__file__", None)
    if not source or module.__name__ in ("__main__", "__mp_main__") or not source.endswith(".py"):
        return None
    path = Path(source)
    return None if _installed(path) else path


@cache
def _installed_roots() -> tuple[str, ...]:
    """Return the folders of Python, of installed packages and of Penstock itself."""
    roots = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    roots |= {*site.getsitepackages(), site.getusersitepackages(), str(Path(penstock.__file__).parent)}
    return tuple(os.path.realpath(root) + os.sep for root in roots if root)


def _installed(path: Path) -> bool:
    return os.path.realpath(path).startswith(_installed_roots())
