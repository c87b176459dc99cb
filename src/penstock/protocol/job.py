"""What every worker of a query run is given when it starts: made by the driver, pickled by Spark."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock.acking.ids import new_seed
from penstock.errors import TopologyError
from penstock.plan.model import Plan
from penstock.settings import Settings
from penstock.state.store import StateStore
from penstock.topology.builder import Topology, TopologyNode
from penstock.topology.components import Component


@dataclass(frozen=True)
class Job:
    """All a worker needs to know; the same object goes to every worker."""

    plan: Plan
    settings: Settings
    components: Mapping[str, bytes]
    """Each component's instance, pickled: every task unpickles one of its own."""
    ticks: Mapping[str, float]
    max_rates: Mapping[str, float] = field(default_factory=dict)
    """Tuples a second each spout may emit, its tasks together, where that is limited."""
    folder: str = ""
    """Where the topology's state survives: a path or fsspec URL; empty where nothing does."""
    shared: str = ""
    """Where components may keep what survives at every level."""
    dead_letters: str = ""
    """Where dead letters of tasks are kept; empty: in ``shared``."""
    archive: str = ""
    """Where workers write their tasks' state: ``folder``, or a place to hand it over at where nothing survives."""
    key: int = field(default_factory=new_seed)
    """Of the roots' ledgers; secret to no one in the run, and different in the next."""

    def instance(self, component: str) -> Component:
        made = pickle.loads(self.components[component])
        assert isinstance(made, Component)
        return made


def make_job(topology: Topology, plan: Plan, folder: str, dumps: Callable[[Any], bytes], archive: str = "") -> Job:
    """What the workers of a topology are told."""
    nodes = topology.nodes.values()
    return Job(
        plan,
        topology.settings,
        {node.id: _pickled(node, dumps) for node in nodes},
        {node.id: node.tick_interval for node in nodes if node.tick_interval},
        {node.id: node.max_rate for node in nodes if node.is_spout},
        folder,
        f"{folder or StateStore(topology.settings.delivery.state_dir).child(topology.name).url}/shared",
        archive=archive or folder,
    )


def _pickled(node: TopologyNode, dumps: Callable[[Any], bytes]) -> bytes:
    try:
        return dumps(node.component)
    except Exception as error:  # pickling runs user code, which may raise anything
        raise TopologyError(
            f"component '{node.id}'",
            f"it cannot be pickled to be sent to the processes that run it ({type(error).__name__}: {error})",
            "Open connections, files and locks in open() or prepare(), not in __init__.",
        ) from error
