"""What travels to the nodes: importable, compiled, and with its source."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from penstock.spark.shipping import penstock_zip, user_zip


@pytest.fixture
def module(tmp_path: Path):
    source = tmp_path / "plumbing.py"
    source.write_text("def burst():\n    raise ValueError('a pipe burst')\n")
    spec = importlib.util.spec_from_file_location("works.plumbing", source)
    assert spec is not None
    return importlib.util.module_from_spec(spec)


def run(path: Path, code: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(path)!r}); {code}"]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=path.parent)


def test_a_users_module_is_imported_compiled_and_still_shows_its_source(tmp_path: Path, module) -> None:
    path = user_zip(tmp_path, [module])
    assert path is not None
    ran = run(path, "import works.plumbing as p; print(p.__file__); p.burst()")
    assert ran.stdout.strip().endswith("plumbing.pyc")
    assert "raise ValueError('a pipe burst')" in ran.stderr


def test_another_python_takes_the_source(tmp_path: Path, module) -> None:
    path = user_zip(tmp_path, [module])
    assert path is not None
    other = tmp_path / "other.zip"
    with zipfile.ZipFile(path) as before, zipfile.ZipFile(other, "w") as after:
        for name in before.namelist():
            data = before.read(name)
            after.writestr(name, b"\0\0" + data[2:] if name.endswith(".pyc") else data)  # another magic number
    ran = run(other, "import works.plumbing as p; print(p.__file__)")
    assert ran.stdout.strip().endswith("plumbing.py"), ran.stderr


def test_penstock_itself_travels_whole(tmp_path: Path) -> None:
    path = penstock_zip(tmp_path)
    ran = run(path, "import penstock.spark.stage as s; print(s.__file__)")
    assert ran.stdout.strip() == str(path / "penstock" / "spark" / "stage.pyc"), ran.stderr
    with zipfile.ZipFile(path) as archive:
        names = set(archive.namelist())
    assert {f"{name}c" for name in names if name.endswith(".py")} <= names
