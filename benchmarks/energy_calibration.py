"""Compares Sol on a cluster of four nodes with the simulator. Service times and the delay between nodes are
measured with the default placement, with many and with few messages in flight; the results of ERDM are predicted.

With few messages in flight (one batch of a spout) the rates are not expected to agree: a real spout waits for the
last message of its batch before it emits the next batch, a simulated one emits after every ack."""

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

FEWER = 50  # messages in flight per spout: one batch
SIMULATED = 60  # seconds
_BEGIN = 20  # seconds of the simulation that are skipped, until the rates are steady
_SEED = 1


@dataclass(frozen=True)
class Measured:
    """Costs per tuple, measured while all cores were busy."""

    services: dict[str, float]
    """Core seconds by component, including its share of the nodes' JVMs, which transfer its input. Most of a
    spout's work, sending the tuple and handling its ack, happens after the emit, so it is counted with the next
    component."""
    sizes: dict[str, float]
    """Bytes per emitted tuple, by component."""
    cores: float
    """Cores that all nodes had together: the machine's cores without the share of driver and kernel."""

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
        """The simulated cluster. ``delay`` is that between nodes. All nodes are on one machine, so each has an
        equal share of its cores, however many nodes there are."""
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
            ackers=0,  # the driver counts acks, over a link without limit
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
    say(f"  the delay between nodes is {1e3 * delay:.1f} ms")
    worst = {"rate": 0.0, "latency": 0.0}
    for pending, (default, erdm) in phases.items():
        for what, phase in (("default, measured", default), ("ERDM, predicted", erdm)):
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
        results.bar(f"sim.calibration.{name}", off_by, f"% largest deviation with {many} pending")


def _simulated(set_up: ClusterSetUp) -> tuple[float, float]:
    """Messages per second and their mean latency."""
    outcome = run(set_up, seed=_SEED)
    return outcome.mean_rate(_BEGIN, SIMULATED) / (LEVELS - 1), outcome.mean_latency(_BEGIN, SIMULATED)


def _delay(measured: Measured, phase: Phase, pending: int) -> float:
    """The delay between nodes with which the simulator has the measured latency, found by bisection."""
    low, high = 0.0, phase.mean
    for _ in range(8):
        middle = (low + high) / 2
        if _simulated(measured.set_up(phase.nodes, pending, middle))[1] < phase.mean:
            low = middle
        else:
            high = middle
    return (low + high) / 2
