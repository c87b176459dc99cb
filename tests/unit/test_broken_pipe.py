"""A command whose reader goes away ends without a traceback: ``penstock plan FILE | head -1``."""

import os
import subprocess
import sys

import pytest

from penstock.cli.terminal import Terminal

_FILE = """
from penstock import TopologyBuilder
from penstock.testing import CaptureBolt, NumberSpout

builder = TopologyBuilder()
builder.set_spout("numbers", NumberSpout(10))
builder.set_bolt("seen", CaptureBolt()).shuffle_grouping("numbers")
topology = builder.build("pipe")
"""


@pytest.mark.parametrize("arguments", [["plan", "FILE"], ["list"]], ids=" ".join)
def test_a_closed_pipe_is_no_error(tmp_path, arguments):
    path = tmp_path / "pipe.py"
    path.write_text(_FILE)
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "penstock.cli.main", *(str(path) if a == "FILE" else a for a in arguments)],
            stdout=writing,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
        )
    finally:
        os.close(writing)
    assert done.stderr == ""
    assert done.returncode == 141


def test_a_closed_pipe_behind_a_table_is_told_and_ends_no_process():
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as gone:
        with pytest.raises(BrokenPipeError):
            Terminal(file=gone).print("a row")
        os.dup2(os.open(os.devnull, os.O_WRONLY), writing)  # what is still buffered is flushed when it is closed
