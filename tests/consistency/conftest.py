"""State folders in memory: a thousand epochs without a thousand waits for the disk."""

import uuid

import fsspec
import pytest


@pytest.fixture
def folder():
    name = f"memory://{uuid.uuid4().hex}"
    yield name
    files = fsspec.filesystem("memory")
    if files.exists(name):
        files.rm(name, recursive=True)
