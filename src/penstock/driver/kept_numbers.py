"""The parallelism that was chosen while a topology ran, by a policy or an operator, and outlives the driver.

Every manifest has the bolts that were scaled (``state.manifest.ScaledBolt``): a replacement writes it when it
takes over the state directory, so a driver that dies at any time afterwards leaves it there. A start uses it for
bolts whose parallelism the program has not changed since.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from penstock.errors import StateError, StateUnavailable, TopologyError
from penstock.state import manifest as manifests
from penstock.state import savepoints
from penstock.state.manifest import ScaledBolt
from penstock.state.store import StateStore
from penstock.topology.builder import Topology

log = logging.getLogger("penstock.driver")


def scaled_bolts(topology: Topology) -> dict[str, ScaledBolt]:
    """Return the bolts of a topology that were scaled since its program declared them."""
    return {
        id: ScaledBolt(*node.declared, node.parallelism)
        for id, node in topology.nodes.items()
        if node.declared is not None
    }


def as_scaled(topology: Topology, scaled: Mapping[str, ScaledBolt]) -> Topology:
    """Return the topology with the parallelism that its bolts had, where the program still declares the same as
    then."""
    kept = {}
    for id, bolt in scaled.items():
        node = topology.nodes.get(id)
        if node is not None and not node.is_spout and (node.parallelism, node.tasks) == bolt[:2]:
            kept[id] = bolt.parallelism
    try:
        return topology.scaled(kept)
    except TopologyError as error:  # other inputs than then may not allow it
        log.warning("topology '%s' begins with the parallelism of its program: %s", topology.name, error)
        return topology


def as_left(topology: Topology, savepoint: str | None = None) -> Topology:
    """Return the topology with the parallelism that was chosen when it ran last, as its state directory or the
    savepoint has it. Without state, or with ``scaling.keep=false``, that is the parallelism of its program. Raises
    ``StateUnavailable`` if the store does not answer."""
    settings = topology.settings
    if settings.delivery.guarantee == "at_most_once" or not settings.scaling.keep:
        return topology
    try:
        if savepoint:
            return as_scaled(topology, savepoints.find(StateStore(savepoint)).scaled)
        found = manifests.newest(StateStore(settings.delivery.state_dir).child(topology.name))
    except StateUnavailable:
        raise
    except StateError as error:  # the start reports it when it takes the directory over
        log.warning("%s", error)
        return topology
    return topology if found is None else as_scaled(topology, found.scaled)


def kept_texts(topology: Topology) -> dict[str, str]:
    """Return, for each bolt that does not begin with the parallelism of its program, a sentence for people."""
    return {
        id: f"begins with parallelism {bolt.parallelism}, which was chosen while it ran; its program declares "
        f"{bolt.declared}"
        for id, bolt in scaled_bolts(topology).items()
    }
