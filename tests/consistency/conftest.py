"""State folders in memory: a thousand epochs without a thousand waits for the disk; and worlds outside."""

import uuid

import fsspec
import pytest

from tests.consistency.components import WORLDS, World


@pytest.fixture
def folder():
    name = f"memory://{uuid.uuid4().hex}"
    yield name
    files = fsspec.filesystem("memory")
    if files.exists(name):
        files.rm(name, recursive=True)


@pytest.fixture
def world():
    """The name of an outside system of the test's own."""
    name = uuid.uuid4().hex
    WORLDS[name] = World()
    yield name
    del WORLDS[name]
