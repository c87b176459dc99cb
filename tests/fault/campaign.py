"""Campaigns of the chaos tests. A campaign is data: a seed determines the topology and the events, their times and
their targets. This module only generates campaigns; ``chaos_run`` carries them out."""

from __future__ import annotations

import random
from dataclasses import dataclass

EVENTS = 12  # events of a whole campaign: 20 seeds make 240 events, a few of which find no target
_SETTLED = 0.35  # share of the events before which the topology must have committed something new
_HEAVY = 2  # events per campaign after which another driver must start, which takes about ten seconds
_SHORT, _LONG = (0.5, 3.0), (8.0, 11.0)
"""Seconds of a stop: shorter and longer than the setting ``lifecycle.heartbeat_timeout`` of the campaigns (6
s)."""
_OUTAGE = ((0.3, 5.0), (0.3, 5.0), (9.0, 13.0))  # seconds; ``message_timeout`` is 10

SINKS = ("parquet", "postgres", "kafka")
DELIVERIES = ("exactly_once", "at_least_once")
_SOURCES = {"parquet": ("files", "numbers"), "postgres": ("numbers", "kafka"), "kafka": ("kafka", "kafka")}


@dataclass(frozen=True)
class Kind:
    """A kind of event."""

    name: str
    weight: int
    """How often it is drawn, compared with others."""
    most: int
    """Of one campaign."""
    needs: str = ""
    """Something that not every campaign has; see ``Campaign.has``."""
    seconds: tuple[tuple[float, float], ...] = ((0.0, 0.0),)
    """The ranges its length is drawn from."""
    forms: tuple[str, ...] = ("",)
    heavy: bool = False


KINDS = (
    Kind("kill worker", 6, 5),
    Kind("stop worker", 4, 3, seconds=(_SHORT, _LONG)),
    Kind("kill executor", 6, 3, "executors"),
    Kind("stop executor", 3, 2, "executors", seconds=(_SHORT, _LONG)),
    Kind("kill JVM", 2, 1, "local", heavy=True),
    Kind("kill driver", 3, 2, heavy=True),
    Kind("stop driver", 3, 2, seconds=(_SHORT, _LONG), forms=("alone", "all")),
    Kind("second driver", 3, 1, forms=("running", "stopped", "all stopped", "refused"), heavy=True),
    Kind("kill broker", 4, 2, "kafka", seconds=_OUTAGE),
    Kind("stop broker", 3, 2, "kafka", seconds=_OUTAGE),
    Kind("kill store", 4, 3, "postgres", seconds=_OUTAGE),
    Kind("stop store", 3, 2, "postgres", seconds=(_SHORT, _LONG)),
    Kind("fill state disk", 3, 2, seconds=_OUTAGE),
    Kind("fill sink disk", 6, 2, "parquet", seconds=_OUTAGE),
    Kind("scale", 4, 3, forms=("count 1", "count 3", "count 4", "pass 1", "pass 3")),
    Kind("replace", 3, 2),
    Kind("savepoint", 3, 2),
    Kind("deactivate", 3, 2, seconds=(_SHORT,)),
)


@dataclass(frozen=True)
class Event:
    """An event that affects a running topology."""

    kind: str
    form: str
    pause: float
    """Seconds since the previous event."""
    settled: bool
    """It waits until something new is committed."""
    seconds: float
    """How long it lasts, where it has a length; other events happen meanwhile."""
    pick: float
    """From 0 to 1: which of those that it could happen to."""

    def __str__(self) -> str:
        length = f" for {self.seconds:.1f} s" if self.seconds else ""
        return f"{self.kind}{f' ({self.form})' if self.form else ''}{length}"


@dataclass(frozen=True)
class Campaign:
    """One topology and what happens to it."""

    seed: int
    sink: str
    source: str
    delivery: str
    nodes: int
    """Spark executors in processes of their own; 0: in the driver's JVM."""
    events: tuple[Event, ...]

    @property
    def exact(self) -> bool:
        return self.delivery == "exactly_once"

    def has(self, need: str) -> bool:
        """What an event of a kind may need."""
        return _has(need, self.sink, self.source, self.nodes)

    def __str__(self) -> str:
        where = f"{self.nodes} executors" if self.nodes else "local"
        return f"seed {self.seed}: {self.source} to {self.sink}, {self.delivery}, {where}"


def draw(seed: int, length: int = EVENTS) -> Campaign:
    """The campaign of a seed. A shorter one is the beginning of the longer one."""
    draw = random.Random(f"chaos {seed}")
    sink = SINKS[seed % len(SINKS)]
    source = _SOURCES[sink][seed // len(SINKS) // len(DELIVERIES) % 2]
    nodes = 2 if seed % 5 in (1, 3) else 0
    kinds = [kind for kind in KINDS if _has(kind.needs, sink, source, nodes)]
    events: list[Event] = []
    while len(events) < length:
        kind = draw.choices(kinds, [kind.weight for kind in kinds])[0]
        heavy = sum(each.heavy for event in events for each in KINDS if each.name == event.kind)
        used = sum(event.kind == kind.name for event in events)
        if used >= kind.most or (kind.heavy and heavy >= _HEAVY):
            continue
        events.append(
            Event(
                kind.name,
                draw.choice(kind.forms),
                round(draw.uniform(0.3, 3.0), 2),
                draw.random() < _SETTLED,
                round(draw.uniform(*draw.choice(kind.seconds)), 2),
                draw.random(),
            )
        )
    delivery = DELIVERIES[seed // len(SINKS) % len(DELIVERIES)]
    return Campaign(seed, sink, source, delivery, nodes, tuple(events))


def _has(need: str, sink: str, source: str, nodes: int) -> bool:
    has = {"": True, "executors": bool(nodes), "local": not nodes, "kafka": "kafka" in (sink, source)}
    return has.get(need, need == sink)
