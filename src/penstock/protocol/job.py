"""The job: the description of a topology that every worker of a query run receives at its start. The driver
makes it, and Spark pickles it."""

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
    """The description of a topology for its workers. Every worker receives the same object."""

    plan: Plan
    settings: Settings
    components: Mapping[str, bytes]
    """Component → its pickled instance. Every task unpickles an instance of its own."""
    ticks: Mapping[str, float]
    """Component → seconds between its ticks; only components with ticks."""
    max_rates: Mapping[str, float] = field(default_factory=dict)
    """Spout → tuples a second that all its tasks together may emit."""
    folder: str = ""
    """The topology's state directory, a path or fsspec URL; empty if no state is kept between query runs."""
    shared: str = ""
    """A folder where components may keep files between query runs, with every delivery guarantee."""
    dead_letters: str = ""
    """The folder of the tasks' dead letters. If it is empty, ``shared`` is used."""
    archive: str = ""
    """The folder where workers write snapshots: ``folder``, or a temporary one for moves if no state is kept."""
    key: int = field(default_factory=new_seed)
    """The key from which the edge ids of roots are derived. All workers know it. Each job has another key."""

    @property
    def ackers(self) -> int:
        """Number of ackers. A single one is a part of the driver."""
        return self.settings.delivery.acker_processes or 1

    def instance(self, component: str) -> Component:
        """A new instance of the component. Called by the worker for each task."""
        made = pickle.loads(self.components[component])
        assert isinstance(made, Component)
        return made


def make_job(topology: Topology, plan: Plan, folder: str, dumps: Callable[[Any], bytes], archive: str = "") -> Job:
    """Make the job of a topology. Called by the driver. Raises ``TopologyError`` if a component cannot be
    pickled."""
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
            f"it cannot be pickled, so it cannot be sent to the workers ({type(error).__name__}: {error})",
            "Open connections, files and locks in open() or prepare(), not in __init__.",
        ) from error
