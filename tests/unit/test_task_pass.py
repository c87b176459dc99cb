"""How much spouts emit in one pass through the bolts of their worker."""

from types import SimpleNamespace

from penstock import SimulatedClock
from penstock.worker.task_pass import PASS_TIME, Level, TaskPass

CLOCK = SimulatedClock()


class OneSpout:
    """Emits as many tuples as it may, or as are offered."""

    def __init__(self, offered=1 << 40):
        self.burst, self.last_emitted, self.offered = 1 << 30, 0, offered
        self.waiting = 0

    def run(self):
        self.last_emitted = min(self.burst, self.offered)
        self.waiting += self.last_emitted
        return self.last_emitted > 0


class OneBolt:
    """Takes ``cost`` seconds for a tuple, at most 2 ms at a time. Each run takes ``fixed`` seconds besides, which
    are not in the code of the component."""

    def __init__(self, spout, cost, fixed=0.0):
        self._spout, self._cost, self._fixed = spout, cost, fixed
        self.stats = SimpleNamespace(busy=0.0)

    def run(self):
        done = min(self._spout.waiting, max(1, int(0.002 / self._cost)))
        self._spout.waiting -= done
        if done:
            self.stats.busy += done * self._cost
            CLOCK.advance(done * self._cost + self._fixed)
        return done > 0


def bursts(spout, bolts, passes=60):
    tasks = TaskPass([spout], [lambda: None], [Level(bolts, [], CLOCK.monotonic)], CLOCK.monotonic)
    found = []
    for _ in range(passes):
        while tasks.run_bolts():
            pass
        tasks.run_spouts()
        found.append(spout.last_emitted)
    return found


def test_a_slow_bolt_gets_few_tuples_at_a_time():
    spout = OneSpout()
    found = bursts(spout, [OneBolt(spout, 0.001)])
    assert found[0] == 256
    assert max(found[20:]) * 0.001 <= PASS_TIME * 1.5, "no tuple waits much longer than a pass"
    assert min(found) >= 1


def test_a_fast_bolt_gets_many():
    spout = OneSpout()
    found = bursts(spout, [OneBolt(spout, 1e-6)])
    assert PASS_TIME / 8 <= found[-1] * 1e-6 <= PASS_TIME


def test_many_tasks_do_not_make_bursts_smaller_and_smaller():
    """Each run costs more than its tuples, so a smaller burst would only cost more."""
    spout = OneSpout()
    found = bursts(spout, [OneBolt(spout, 1e-6, fixed=0.0002) for _ in range(32)])
    assert found[-1] >= 512


def test_a_spout_with_little_to_emit_keeps_its_burst():
    spout = OneSpout(offered=3)
    bursts(spout, [OneBolt(spout, 1e-6)])
    assert spout.burst == 256


def test_without_bolts_in_the_worker_nothing_is_limited():
    spout = OneSpout(offered=100_000)
    tasks = TaskPass([spout], [], [], CLOCK.monotonic)
    assert tasks.run_spouts()
    assert spout.last_emitted == 100_000
