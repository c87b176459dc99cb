"""Campaigns of random events on Spark: nothing is lost and nothing is wrong, whatever is killed, stopped, filled
up or changed.

A seed that fails is run again alone: ``pytest tests/fault/test_chaos.py --seed 7``, with ``-s`` to watch it. The
events are the same; the moments at which they strike depend on the machine.
"""

import contextlib
import subprocess

import pytest

from tests.fault import campaign as campaigns
from tests.fault.chaos_run import HARD_LIMIT, ChaosRun
from tests.fault.outputs import KafkaOutput, ParquetOutput, PostgresOutput, write_files, write_topic

SHORT = 4  # events of a campaign inside make test


@pytest.fixture
def disks(tmp_path):
    """Two disks of 48 MB, for the state directory and for the output; none without the right to mount."""
    mounted = {}
    with contextlib.ExitStack() as stack:
        for name in ("state", "sink"):
            folder = tmp_path / f"{name}-disk"
            folder.mkdir()
            mount = ["mount", "-t", "tmpfs", "-o", "size=48m", "tmpfs", folder]
            if subprocess.run(mount, capture_output=True).returncode == 0:
                stack.callback(subprocess.run, ["umount", "-l", folder], check=True)
                mounted[name] = folder
        yield mounted


@pytest.mark.timeout(HARD_LIMIT + 150)  # which a campaign keeps by itself, and then tells what it saw
@pytest.mark.seeds(1, 20)
def test_chaos(tmp_path, request, full, disks, chaos_report, seed):
    events = request.config.getoption("--events") or (campaigns.EVENTS if full else SHORT)
    campaign = campaigns.draw(seed, events)
    servers = {name: request.getfixturevalue(name) for name in ("kafka", "postgres") if campaign.has(name)}
    run = ChaosRun(tmp_path, campaign, servers, disks, rows=30_000 if full else 10_000)
    chaos_report(run)
    with contextlib.closing(run):
        prepare(run)
        run.play()
    assert run.good, run.line()


def prepare(run):
    """Fill the source, and open the sink for reading."""
    ends = run.config["chaos"]
    if run.campaign.has("kafka"):
        kafka = run.servers["kafka"]
        kafka.create_topic(ends["topic_in"], partitions=4)
        kafka.create_topic(ends["topic_out"], partitions=2)
    if ends["source"] == "kafka":
        write_topic(ends["bootstrap"], ends["topic_in"], run.count)
    elif ends["source"] == "files":
        write_files(run.folder / "input", run.count)
    if ends["sink"] == "parquet":
        run.output = ParquetOutput(run.config["output"])
    elif ends["sink"] == "postgres":
        run.output = PostgresOutput(ends["dsn"], ends["table"])
    else:
        run.output = KafkaOutput(ends["bootstrap"], ends["topic_out"])
