"""A topology that is replaced repeatedly while processes are killed, and a check of who owns its state."""

import itertools
import json
import os
import threading
import time
from pathlib import Path

from penstock.errors import PenstockError
from penstock.state import manifest as manifests
from penstock.state.store import StateStore
from tests.fault.harness import Run, started_by

STEPS = ("checked", "standing_by", "copied", "paused", "drained", "closed", "claimed", "opened", "activated")
"""Of a replacement, in order; see ``driver.replacement``."""
MOVE_STEPS = ("prefetched", "doubled", "stored", "mapped", "merged", "switched")
"""Of one worker's move; see ``driver.move``."""
SLOW = 500  # tuples a second: the input outlasts the kills
_LOOK = 0.02  # seconds; a manifest is there for half a second at least
_DEADLINE = 400.0  # seconds for a run with many kills


class OwnerRule:
    """Looks at the manifests while the topology runs. Each has a number that grows with every take-over of the
    state directory: where two starts committed, an epoch would come twice, or an old number after a newer one."""

    def __init__(self, store):
        self._store = store
        self._seen = {}
        self._wrong = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, name="owners", daemon=True)
        self._thread.start()

    def stop(self):
        self._over.set()
        self._thread.join()

    def verdict(self):
        """What is wrong; and how often the directory was taken over."""
        found = sorted((epoch, attempt) for epoch, (attempt, _) in self._seen.items())
        wrong = list(self._wrong)
        for (before, older), (epoch, newer) in itertools.pairwise(found):
            if newer < older:
                wrong.append(f"epoch {epoch} is of owner {newer}, and epoch {before} of owner {older}")
        return wrong, len({attempt for _, attempt in found})

    def _look(self):
        while not self._over.wait(_LOOK):
            try:
                for name in manifests.history(self._store):
                    self._note(manifests.Manifest.read(self._store, name))
            except PenstockError:
                continue  # pruned under our eyes, or nothing there yet

    def _note(self, manifest):
        if manifest.epoch == manifest.base[1]:
            return  # what a start began with: not a commit
        mark = (manifest.generation, manifest.created)
        before = self._seen.setdefault(manifest.epoch, mark)
        if before != mark:
            self._wrong.append(f"epoch {manifest.epoch} was committed twice: {before}, {mark}")
            self._seen[manifest.epoch] = mark


class ReplaceRun(Run):
    """One topology that is replaced again and again."""

    def __init__(self, folder, seed, delivery, count=12_000, scale=(4, 1, 2, 3), **settings):
        super().__init__(folder, seed, delivery, count, rate=1_000_000, **settings)
        owners = self.folder / "owners"
        owners.mkdir()
        self.config.update(
            scale=scale,
            max_rate=SLOW,
            owners=str(owners),
            ambush=str(self.folder / "ambush.json"),
            hurry=str(self.folder / "hurry"),
        )
        self.deadline = time.monotonic() + _DEADLINE
        self._store = StateStore(self.config["settings"]["state_dir"]).child("faults")
        self._owners = OwnerRule(self._store)

    def start(self):
        """On a slow machine all input may be through before a driver dies: the next has nothing to execute."""
        self.launch()
        self.await_("the topology to run", lambda: self.status().get("state") == "active")

    def close(self):
        super().close()
        self._owners.stop()

    # ---- faults ----------------------------------------------------------------------------------------

    steps, victims, longest = STEPS, ("old", "old", "new", "new", "driver"), 2.0

    def kill_somebody(self):
        """kill -9 of a worker of either start or of the driver, at a moment of a replacement that the seed
        says."""
        draw = self.random
        of = draw.choice(self.victims)
        delay = draw.choice((0.0, draw.uniform(0.0, self.longest / 10), draw.uniform(0.0, self.longest)))
        self.kill({"step": draw.choice(self.steps), "delay": delay, "of": of, "pick": draw.random()})

    def kill(self, plan):
        """As an ambush that ``Scaler`` takes says."""
        before = self.status()
        self._lay(plan)
        if plan["of"] == "driver":
            self.await_death()
            self.start()
        else:
            self.await_("a strike", lambda: len(self.status().get("struck", ())) > len(before["struck"]))
        self.settled(f"replace {plan['of']} kill at {plan['step']} + {plan['delay']:.2f} s", self.status())

    def _lay(self, plan):
        path = Path(self.config["ambush"])
        temporary = path.with_suffix(".new")
        temporary.write_text(json.dumps(plan))
        os.replace(temporary, path)

    def survive(self, what, committed=lambda: None):
        """The driver dies by itself (``lifecycle.crash_at``), is started again, and all comes out right.
        ``committed`` looks at what it left."""
        try:
            self.launch()
            self.await_death()
            self.faults.append((what, 0.0))
            committed()
            self.config["settings"]["crash_at"] = ""
            self.start()
            self.finish()
        finally:
            self.close()

    def await_death(self):
        """Until the driver has died by itself, and all it had started."""
        code = self.driver.wait(max(1.0, self.deadline - time.monotonic()))
        assert code < 0, self.story()
        until = time.monotonic() + 30
        while alive := started_by(str(self.folder)):
            assert time.monotonic() < until, f"orphans of a dead driver: {alive}"
            time.sleep(0.05)  # polls, because other processes cannot be waited for

    def settled(self, kind, struck):
        """Note a fault once the replacement it fell into has come to an end, one way or the other, and there is
        new output or a new epoch."""
        since, self._mark = time.time(), None

        def over():
            status = self.status()
            ended = (status["replaced"], len(status["refused"])) != (struck["replaced"], len(struck["refused"]))
            return ended and status["state"] == "active" and self.new_output(status)

        self.await_("an end of the replacement", over)
        self.faults.append((kind, round(time.time() - since, 2)))

    def new_output(self, status):
        return super().new_output({**status, "restarts": (status["restarts"], status["start"])})

    # ---- results ---------------------------------------------------------------------------------------

    def tasks_in_state(self):
        """Over how many tasks the newest committed epoch has the counts spread."""
        return manifests.newest(self._store).parallelism["count"]

    def finish(self):
        """The same as for any run, while replacements go on; and one owner at any time."""
        Path(self.config["hurry"]).touch()
        super().finish()
        wrong, owners = self._owners.verdict()
        two = self.folder / "owners" / "two"
        assert not two.exists(), f"two starts emit: {two.read_text()}\n{self.story()}"
        assert not wrong, f"{wrong}\n{self.story()}"
        assert owners > 1, "the watch has seen owners come and go"


class MoveRun(ReplaceRun):
    """One topology on two nodes, whose workers move to and fro one by one. Struck are the slots a worker leaves or
    takes, any worker, or the driver; what comes after a step takes a tenth of a second."""

    steps, victims, longest = MOVE_STEPS, ("old", "new", "new", "other", "driver"), 0.2

    def __init__(self, folder, seed, delivery, **settings):
        settings = {"master": "local-cluster[2,12,1024]", "spare_slots": 1, **settings}
        super().__init__(folder, seed, delivery, scale=(), **settings)
