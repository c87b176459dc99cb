"""The groups of settings. The first field of a group may be given by position: ``Delivery("exactly_once")``.

Every field has a unit, a default and a reason. A group checks its own values; ``Settings`` checks values that must
fit together across groups.
"""

from __future__ import annotations

import dataclasses
from dataclasses import KW_ONLY, dataclass

from penstock.errors import SettingError
from penstock.settings.fields import check_value, setting
from penstock.settings.rates import parse_rates


class Group:
    """Base class of all groups. The name of a group is that of its class in lower case: ``Flow`` is ``flow``."""

    @classmethod
    def group_name(cls) -> str:
        """The name used in settings, as in ``--set flow.load_factor=0.7``."""
        return cls.__name__.lower()

    def __post_init__(self) -> None:
        for spec in dataclasses.fields(self):  # type: ignore[arg-type]
            check_value(f"{self.group_name()}.{spec.name}", spec, getattr(self, spec.name))
        self._check()

    def _check(self) -> None:
        """Raise ``SettingError`` for invalid values and for values that do not fit together."""

    def _refuse(self, field: str, rule: str, hint: str) -> SettingError:
        return SettingError(
            f"setting {self.group_name()}.{field}", f"{getattr(self, field)!r} is not allowed: {rule}", hint
        )


@dataclass(frozen=True)
class Delivery(Group):
    """The delivery guarantee, and where its state is stored."""

    guarantee: str = setting(
        "at_most_once",
        "",
        "at_most_once tracks nothing; at_least_once replays tuples that were not acked; exactly_once "
        "commits epochs",
        choices=("at_most_once", "at_least_once", "exactly_once"),
    )
    _: KW_ONLY
    max_spout_pending: int = setting(
        50_000,
        "tuples",
        "unacked tuples of one spout task, with at_least_once. The default is about 0.1 s of a fast word count",
    )
    message_timeout: float = setting(
        30.0, "s", "a tuple that is not acked within this time has failed. The default is Storm's"
    )
    epoch_interval: float = setting(
        10.0, "s", "time between two commits. A restart repeats the work of at most about one interval"
    )
    overtake_after: float = setting(
        2.0,
        "s",
        "an epoch that takes longer ends without waiting for full queues, with exactly_once: the tuples that wait "
        "are stored with it. The default is several times what an epoch takes while queues are short",
        zero=True,
    )
    state_dir: str = setting(
        "penstock-state",
        "",
        "folder for state that survives a restart: a path, or an fsspec URL that all nodes can reach",
    )
    on_error: str = setting(
        "drop",
        "",
        "what an exception in a component does: drop the tuple and count it, or stop the topology",
        choices=("drop", "stop"),
    )
    ackers: int = setting(
        1,
        "",
        "ackers, with at_least_once. A single one is a part of the driver; several are processes of their own, "
        "spread over the nodes. One settles hundreds of thousands of tuples a second",
        most=256,
    )

    @property
    def acker_processes(self) -> int:
        """Number of acker processes. 0 if acks are not tracked or the driver is the only acker."""
        return self.ackers if self.guarantee == "at_least_once" and self.ackers > 1 else 0


@dataclass(frozen=True)
class Flow(Group):
    """Flow control: what happens when a task receives more than it can process."""

    mode: str = setting(
        "step",
        "",
        "how an overloaded task slows its senders: step by step (Lu 2020), by stopping the spouts, by credits, or "
        "not at all",
        choices=("step", "spout", "credit", "none"),
    )
    _: KW_ONLY
    load_factor: float = setting(
        0.8, "", "a task is overloaded when its inbox is filled to more than this share. Lu 2020 calls it L"
    )
    step_factor: float = setting(2.0, "", "one step divides a sender's rate by this. Lu 2020 calls it v'")
    overflow_bytes: int = setting(
        268_435_456,
        "bytes",
        "what may wait on local disk for one task, so that it does not block tuples for other tasks",
        zero=True,
    )
    board: str = setting(
        "coordinator",
        "",
        "where tasks post messages to each other: coordinator (the driver), or zookeeper://host:port/path",
    )
    inbox_capacity: int = setting(
        16_384,
        "tuples",
        "the size of a task's inbox, unless its task is so slow that queue_time makes it smaller or so fast that "
        "inbox_time makes it larger",
    )
    queue_time: float = setting(
        0.0,
        "s",
        "an inbox holds at most what its task processes in this time; with at_least_once, a send queue what it "
        "may send. 0: so much that all queues on the longest path hold half of delivery.message_timeout",
        zero=True,
    )
    inbox_time: float = setting(
        0.1,
        "s",
        "an inbox holds what its task processes in this time, if that is more than inbox_capacity. A signal to "
        "the senders takes about a tenth of it",
        zero=True,
    )

    def _check(self) -> None:
        if not 0.5 < self.load_factor < 1:
            raise self._refuse("load_factor", "it must lie between 0.5 and 1", "The default is 0.8.")
        if self.step_factor <= 1:
            raise self._refuse("step_factor", "it must be greater than 1, since a step slows the sender", "Try 2.")


@dataclass(frozen=True)
class Migration(Group):
    """Data migration (Sun 2022): another task processes the tuples for an overloaded task."""

    enabled: bool = setting(
        True,
        "",
        "whether tuples for an overloaded task go to a less loaded one. Only for bolts that emit partials",
    )
    _: KW_ONLY
    interval: float = setting(0.5, "s", "time between two decisions. The default covers two reports of each task")
    alpha: float = setting(
        0.3, "", "weight of the queue against the surplus. Sun 2022 measured 0.3 to be the best value"
    )
    beta: float = setting(0.5, "", "weight of the bandwidth. Sun 2022 measured 0.5 to be the best value")
    recovery: float = setting(
        0.5, "", "a task gets its tuples back when its queue is filled to less than this share"
    )
    bandwidth: str = setting(
        "",
        "",
        "bytes per second of links that are not measured: COMPONENT/INDEX=RATE for a task, NODE=RATE, or "
        "NODE>NODE=RATE, separated by commas",
    )

    def _check(self) -> None:
        try:
            parse_rates(self.bandwidth)
        except ValueError as error:
            raise self._refuse("bandwidth", str(error), "For example: work/0=5e6, node1>node2=12.5e6") from None
        if not self.alpha < 1:
            raise self._refuse("alpha", "it must lie between 0 and 1", "Try 0.3.")


@dataclass(frozen=True)
class Scaling(Group):
    """Whether bolts get more or fewer tasks automatically."""

    policy: str = setting(
        "off",
        "",
        "what decides about the number of tasks: failures counts time-outs (Lu 2020), rate compares rates",
        choices=("off", "failures", "rate"),
    )
    _: KW_ONLY
    interval: float = setting(
        5.0,
        "s",
        "length of one load sample. The default covers twenty reports, so one more or less does not matter",
    )
    least: int = setting(1, "executors", "a bolt keeps at least this many. Each needs a worker, even when idle")
    most: int = setting(
        32,
        "executors",
        "a bolt gets at most this many. The default is half the slots of a local master, since the old and the "
        "new topology run side by side for a moment",
    )
    cool_down: float = setting(
        30.0,
        "s",
        "no decision for this long after a change, because its backlog looks like load. The default is the time "
        "that the policy failures looks back",
        zero=True,
    )
    samples: int = setting(
        6,
        "load samples",
        "how many load samples the policy failures looks back for its average and variance. Lu 2020 calls it n "
        "and gives no value",
    )
    threshold: float = setting(
        25.0,
        "time-outs²",
        "the policy failures acts when the variance of the time-outs is above this. A deviation of five time-outs "
        "can be chance. Lu 2020 calls it C",
        zero=True,
    )
    keep: bool = setting(
        True,
        "",
        "whether a start begins with the parallelism that was chosen when the topology ran last, by a policy or "
        "by hand, for bolts whose parallelism in the program is still the same",
    )
    target: float = setting(
        0.7,
        "",
        "share of its time that the busiest task should work, for the policy rate. The rest is for variation "
        "within a load sample",
    )

    def _check(self) -> None:
        if self.most < self.least:
            raise self._refuse(
                "most", f"it must be at least scaling.least, {self.least}", "Raise it, or lower scaling.least."
            )
        if self.samples < 2:
            raise self._refuse(
                "samples", "it must be at least 2: a single load sample has no average to differ from", "Try 6."
            )
        if not self.target < 0.8:
            raise self._refuse(
                "target",
                "it must lie between 0 and 0.8, because a task may be 20 % busier and needs time in reserve",
                "Try 0.7.",
            )


@dataclass(frozen=True)
class Workers(Group):
    """How many workers a topology has, and which components share them."""

    count: int = setting(
        0,
        "workers",
        "most workers, without those of blocking components. 0: as many as the master offers cores; with "
        "placement=erdm one for each executor",
        zero=True,
    )
    _: KW_ONLY
    refit: str = setting(
        "once",
        "",
        "when components are packed into workers by their measured load: once after refit_after, always, or off. "
        "Components whose calls wait get workers of their own in both cases. With at-most-once delivery once does "
        "nothing, since a replacement loses what components keep outside of their state; nor does it with "
        "placement=erdm, which moves single executors, unless workers is set",
        choices=("once", "always", "off"),
    )
    refit_after: float = setting(
        60.0,
        "s",
        "how long the measured load must propose the same packing. The default covers six load samples, so that a "
        "burst or the start itself does not decide",
    )


@dataclass(frozen=True)
class Monitor(Group):
    """The load monitor, which records what executors, streams and nodes do in each load sample."""

    store: str = setting(
        "off",
        "",
        "where load samples are stored: off, memory, sqlite (a file in delivery.state_dir), a file, or "
        "postgresql://…",
    )
    _: KW_ONLY
    interval: float = setting(
        30.0,
        "s",
        "length of one load sample. Pu 2021 uses 30 s: shorter ones cost more reports, longer ones give older "
        "figures",
    )
    keep: float = setting(
        86_400.0, "s", "how long load samples stay in the database. A day needs some MB for a hundred executors"
    )


@dataclass(frozen=True)
class Transport(Group):
    """How tuples are sent from one executor to the next."""

    linger: float = setting(
        0.001,
        "s",
        "least time between two frames of a spout to one task. A tuple that follows a longer pause leaves at once",
        zero=True,
    )
    _: KW_ONLY
    busy_linger: float = setting(
        0.02,
        "s",
        "the same for a worker that is never idle. Larger frames cost less, and its queue is longer than "
        "this anyway",
    )
    frame_bytes: int = setting(
        131_072, "bytes", "size at which a frame is sent. The cost per byte hardly falls beyond 64 to 256 KB"
    )
    spout_pause: float = setting(
        0.001,
        "s",
        "pause after a next_tuple that emitted nothing. Storm also waits 1 ms. It grows tenfold while "
        "the spout emits nothing",
    )
    fusing: bool = setting(
        True,
        "",
        "components joined by local_or_shuffle with equal parallelism run in one worker; tuples pass between them "
        "in memory",
    )


@dataclass(frozen=True)
class Lifecycle(Group):
    """Starting, supervising, restarting and ending a topology."""

    start_timeout: float = setting(
        60.0,
        "s",
        "how long the workers may take to connect and to open, and how long a state store that does not answer is "
        "asked again. A cold JVM needs about 5 s",
    )
    _: KW_ONLY
    heartbeat_timeout: float = setting(
        20.0, "s", "a worker that is silent for longer is dead. Nothing else reveals a process that hangs"
    )
    drain_timeout: float = setting(
        10.0, "s", "how long an end or a replacement waits for tuples in flight, and for the commit of an epoch"
    )
    max_restarts: int = setting(
        10,
        "",
        "restarts before the topology gives up. The first follows at once, the next ones after 0.5 s to 30 s",
        zero=True,
    )
    metrics_interval: float = setting(
        0.25,
        "s",
        "time between two reports of a worker. Four reports per second make the live view look continuous",
    )
    crash_at: str = setting(
        "", "", "for tests of recovery: exit at this step of a commit, written STEP:EPOCH[:WORKER]"
    )
