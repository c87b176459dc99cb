"""Processes are killed under load at random times: at least once every input is in the output, exactly once the
output and the counts equal a sequential run."""

import os

import pytest

from tests.fault.harness import Run

LEVELS = pytest.mark.parametrize("delivery", ["at_least_once", "exactly_once"])


@LEVELS
@pytest.mark.seeds(1, 2)
def test_workers_killed(tmp_path, campaign, full, delivery, seed):
    with Run(tmp_path, seed, delivery, count=30_000 if full else 20_000) as run:
        for _ in range(6 if full else 2):
            run.wait_a_while()
            run.kill_worker()
        run.finish()
    campaign(run)


@LEVELS
@pytest.mark.seeds(0, 1)
def test_executors_killed(tmp_path, campaign, delivery, seed):
    with Run(tmp_path, 100 + seed, delivery, count=25_000, master="local-cluster[2,8,1024]") as run:
        for _ in range(4):
            run.wait_a_while()
            run.kill_executor()
        run.finish()
    campaign(run)


@LEVELS
@pytest.mark.seeds(0, 1)
def test_drivers_killed(tmp_path, campaign, delivery, seed):
    with Run(tmp_path, 200 + seed, delivery, count=25_000) as run:
        for _ in range(3):
            run.wait_a_while()
            run.kill_driver()
        run.finish()
    campaign(run)


@LEVELS
@pytest.mark.seeds(0, 1)
def test_a_worker_stalled_past_the_time_out(tmp_path, campaign, delivery, seed):
    with Run(tmp_path, 300 + seed, delivery, heartbeat_timeout=3.0) as run:
        run.wait_a_while()
        run.stall_worker()
        run.finish()
    campaign(run)


@pytest.mark.seeds(0, 1)
@pytest.mark.parametrize(
    "step", ["marked:2:0.1", "snapshotted:2:2.0", "written:2:1.1", "reported:2:3.0", "published:2:3.0"]
)
def test_a_worker_dies_between_two_steps_of_a_commit(tmp_path, campaign, step, seed):
    with Run(tmp_path, 400 + seed, "exactly_once", crash_at=step) as run:
        run.await_("the crash", lambda: run.status().get("restarts", 0) > 0)
        run.faults.append((f"crash at {step}", 0.0))
        run.finish()
    campaign(run)


@pytest.mark.seeds(0, 1)
@pytest.mark.parametrize("step", ["announced:2", "collected:2", "committed:2", "notified:2"])
def test_the_driver_dies_between_two_steps_of_a_commit(tmp_path, campaign, step, seed):
    run = Run(tmp_path, 500 + seed, "exactly_once", crash_at=f"{step}:driver")
    try:
        run.start()
        assert run.driver.wait(60) < 0, run.story()
        run.faults.append((f"driver crash at {step}", 0.0))
        run.config["settings"]["crash_at"] = ""
        run.start()
        run.finish()
    finally:
        run.close()
    campaign(run)


@pytest.mark.seeds(1, 1)
def test_a_corrupt_snapshot_is_passed_over_loudly(tmp_path, campaign, seed):
    """At least once, since sinks that published an epoch cannot take it back."""
    with Run(tmp_path, 600 + seed, "at_least_once") as run:
        run.await_("some epochs", lambda: run.status().get("committed", 0) >= 4)
        run.stop_driver()
        while not run.newest_files():
            run.start()
            run.await_("an epoch with changes", run.newest_files)
            run.stop_driver()
        spoilt = run.spoil_newest_snapshot()
        run.start()
        run.faults.append((f"corrupt {os.path.basename(spoilt)}", 0.0))
        run.finish()
        log = run.log.read_text()
    assert "their signature differs" in log
    assert "FALLING BACK from epoch" in log
    campaign(run)


@pytest.mark.seeds(0, 1)
def test_the_disk_of_the_state_directory_fills_up(tmp_path, campaign, small_disk, seed):
    """Epochs are not committed while it is full, loudly; afterwards they are, and nothing is lost or doubled."""
    with Run(tmp_path, 700 + seed, "exactly_once", state_dir=str(small_disk)) as run:
        run.await_("an epoch", lambda: run.status().get("committed", 0) >= 2)
        ballast = small_disk / "ballast"
        with ballast.open("wb") as file:
            try:
                while True:
                    file.write(bytes(65536))
                    file.flush()
            except OSError:
                pass
        run.await_("a refused epoch", lambda: "was not committed" in run.log.read_text())
        ballast.unlink()
        run.faults.append(("disk full", 0.0))
        run.finish()
    campaign(run)
