"""Sol on the cluster of four nodes and in the simulator. Service times and the delay of a hop are measured with
the default placement, with many messages under way and with few; ERDM's are foretold.

With few, one batch of a spout, rates are not expected to agree: a spout waits for the last message of its batch
before it emits the next, a simulated one emits for every ack."""

from __future__ import annotations

import argparse
import dataclasses
from dataclasses import dataclass

from benchmarks.energy_cluster import UNLIMITED, Phase, Watch, rearranged, submitted
from benchmarks.erdm_topologies import FOUR_NODES, LEVELS, sol
from benchmarks.harness import Results, say
from penstock.driver.load_sample import MonitorSample
from penstock.sim.cluster import run
from penstock.sim.executor import SimComponent
from penstock.sim.machine import MachineSpec
from penstock.sim.outcome import ClusterSetUp

FEWER = 50  # messages of a spout that may be under way: one batch
SIMULATED = 60  # s
_BEGIN = 20  # s of these until it is at rest
_SEED = 1


@dataclass(frozen=True)
class Measured:
    """Of one tuple, where all cores are busy."""

    services: dict[str, float]
    """Core seconds by component; its share of the nodes' JVMs, which move what it takes, included. What spouts do
    is mostly done when a tuple has been emitted, to send it and to hear of it: it counts with the next."""
    sizes: dict[str, float]
    """Bytes it emits."""
    cores: float
    """All nodes together had: the machine's, without what driver and kernel take."""

    @classmethod
    def of(cls, sample: MonitorSample, rate: float) -> Measured:
        executors, moving = sample.executors, sum(node.other.cpu for node in sample.nodes)
        components = list(dict.fromkeys(each.component for each in executors))
        cpu = {name: sum(each.cpu for each in executors if each.component == name) for name in components}
        sizes = {}
        for name in components:
            streams = [stream for stream in sample.streams if stream.source.startswith(f"{name}@")]
            tuples = sum(stream.tuples for stream in streams)
            sizes[name] = sum(stream.bytes for stream in streams) / tuples if tuples else 0.0
        services = {name: (cpu[name] + moving / len(components)) / rate for name in components}
        services[components[1]] += services[components[0]]
        services[components[0]] = 0.0
        return cls(services, sizes, sum(cpu.values()) + moving)

    def set_up(self, nodes: int, pending: int, delay: float = 0.0) -> ClusterSetUp:
        """``delay`` of a hop between nodes. All nodes are on one machine, so each has an equal part of its cores,
        however many there are."""
        slower = nodes / self.cores
        names = list(self.services)
        components = []
        for place, name in enumerate(names):
            components.append(
                SimComponent(
                    name,
                    FOUR_NODES.spouts if place == 0 else FOUR_NODES.bolts,
                    self.services[name] * slower,
                    names[place - 1] if place else None,
                    size=self.sizes[name],
                    emits=1 if place < len(names) - 1 else 0,
                )
            )
        return ClusterSetUp(
            tuple(components),
            SIMULATED,
            MachineSpec(cores=1, delay=delay),
            machines=nodes,
            workers=nodes,
            ackers=0,  # beside the coordinator, which has a link without limit
            max_pending=pending,
        )


def measure_energy_calibration(results: Results, options: argparse.Namespace) -> None:
    seconds = 10.0 if options.quick else 30.0
    many, few = FOUR_NODES.pending, FEWER
    phases: dict[int, tuple[Phase, Phase]] = {}
    samples: dict[int, MonitorSample] = {}
    for pending in (many, few):
        topology = sol(dataclasses.replace(FOUR_NODES, pending=pending), UNLIMITED)
        with submitted(topology) as (handle, cluster), Watch(handle, cluster) as watch:
            default = watch.measure("default", seconds)
            sample = handle.internals.monitor.newest(handle.internals.bus)
            assert sample is not None, "a measurement takes longer than a window"
            samples[pending] = sample
            rearranged(handle)
            phases[pending] = default, watch.measure("erdm", seconds)
    measured = Measured.of(samples[many], phases[many][0].rate)
    delay = _delay(measured, phases[few][0], few)
    say(f"  a hop between nodes takes {1e3 * delay:.1f} ms")
    worst = {"rate": 0.0, "latency": 0.0}
    for pending, (default, erdm) in phases.items():
        for what, phase in (("default, measured", default), ("ERDM, foretold", erdm)):
            rate, latency = _simulated(measured.set_up(phase.nodes, pending, delay))
            off = {"rate": 100 * (rate / phase.rate - 1), "latency": 100 * (latency / phase.mean - 1)}
            if pending == many:
                worst = {name: max(worst[name], abs(off[name])) for name in worst}
            results.row(
                what=f"sol, {pending} pending",
                case=what,
                nodes=phase.nodes,
                **{
                    "tuple/s": round(phase.rate),
                    "simulated tuple/s": round(rate),
                    "rate %": round(off["rate"], 1),
                    "mean ms": round(1e3 * phase.mean),
                    "simulated ms": round(1e3 * latency),
                    "latency %": round(off["latency"], 1),
                },
            )
            say(f"  {what}: {phase.rate:,.0f}/s, simulated {rate:,.0f}; {phase.mean:.3f} s, {latency:.3f}")
    for name, off_by in worst.items():
        results.bar(f"sim.calibration.{name}", off_by, f"% off at most, with {many} pending")


def _simulated(set_up: ClusterSetUp) -> tuple[float, float]:
    """Messages a second, and their mean latency."""
    outcome = run(set_up, seed=_SEED)
    return outcome.mean_rate(_BEGIN, SIMULATED) / (LEVELS - 1), outcome.mean_latency(_BEGIN, SIMULATED)


def _delay(measured: Measured, phase: Phase, pending: int) -> float:
    """Of a hop, so that the simulator has the latency that was measured; by halving."""
    low, high = 0.0, phase.mean
    for _ in range(8):
        middle = (low + high) / 2
        if _simulated(measured.set_up(phase.nodes, pending, middle))[1] < phase.mean:
            low = middle
        else:
            high = middle
    return (low + high) / 2
