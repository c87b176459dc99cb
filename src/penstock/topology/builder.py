"""The topology builder (Storm's ``TopologyBuilder`` in Python) and the inert ``Topology`` it returns."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from penstock.errors import TopologyError
from penstock.settings import Settings
from penstock.topology import groupings
from penstock.topology.components import BaseBolt, BaseSpout, Component
from penstock.topology.groupings import Grouping
from penstock.topology.names import check_name
from penstock.topology.streams import DEFAULT_STREAM, OutputDeclarer, Stream


@dataclass(frozen=True)
class Subscription:
    """One input of a bolt: a stream of another component, and the grouping that distributes it over the bolt's
    tasks."""

    component: str
    stream: str
    grouping: Grouping
    line: str = field(default="", compare=False)


@dataclass(frozen=True)
class TopologyNode:
    """One component of a topology with its parallelism, streams, inputs and options."""

    id: str
    component: Component
    parallelism: int
    tasks: int
    streams: Mapping[str, Stream]
    inputs: tuple[Subscription, ...] = ()
    tick_interval: float | None = None
    max_rate: float = math.inf
    """Maximum tuples per second that all tasks of a spout may emit together."""
    fixed: bool = False
    """True: the scaling policy never changes the number of tasks of this bolt."""
    blocking: bool = False
    """True: each executor has a worker of its own, because its calls wait."""
    line: str = field(default="", compare=False)
    declared: tuple[int, int] | None = field(default=None, compare=False)
    """Parallelism and number of tasks in the program, if the bolt was scaled since."""

    @property
    def is_spout(self) -> bool:
        return isinstance(self.component, BaseSpout)

    @property
    def data_inputs(self) -> tuple[Subscription, ...]:
        """The inputs without those of the bolt's ``control_stream``."""
        control = getattr(self.component, "control_stream", "")
        return tuple(each for each in self.inputs if not control or each.stream != control)


@dataclass(frozen=True)
class Topology:
    """A validated topology: data only. ``nodes`` keeps the order in which the components were added."""

    name: str
    nodes: Mapping[str, TopologyNode]
    settings: Settings = field(default_factory=Settings)

    def stream(self, component: str, stream: str) -> Stream:
        return self.nodes[component].streams[stream]

    def subscribers(self, stream: Stream) -> list[tuple[TopologyNode, Subscription]]:
        """The components that subscribe to a stream, in the order in which they were added."""
        return [
            (node, subscription)
            for node in self.nodes.values()
            for subscription in node.inputs
            if (subscription.component, subscription.stream) == (stream.component, stream.name)
        ]

    def cautions(self) -> list[tuple[str, str]]:
        """What users should know before the topology runs: ⟨component, sentence⟩."""
        guarantee = self.settings.delivery.guarantee
        return [
            (node.id, text)
            for node in self.nodes.values()
            for text in node.component.cautions(f"component '{node.id}'", guarantee)
        ]

    def scaled(self, parallelism: Mapping[str, int]) -> Topology:
        """Return a validated copy in which the named bolts have the given number of executors.

        If a bolt has more tasks than executors, its number of tasks changes by the same factor, rounded up.
        Components that are not named do not change. If only one of two fused bolts is scaled, they are no longer
        fused. Raises ``TopologyError`` for an unknown component, a spout, or a parallelism below 1.
        """
        from penstock.topology.validation import validate

        nodes = dict(self.nodes)
        for id, new in parallelism.items():
            node = self._scalable(id, new)
            declared = node.declared or (node.parallelism, node.tasks)
            scaled = replace(node, parallelism=new, tasks=-(-node.tasks * new // node.parallelism))
            same = declared == (scaled.parallelism, scaled.tasks)
            nodes[id] = replace(scaled, declared=None if same else declared)
        result = replace(self, nodes=nodes)
        validate(result)
        return result

    def as_declared(self) -> Topology:
        """Return the topology as its program declares it, without what was scaled since."""
        nodes = dict(self.nodes)
        for id, node in nodes.items():
            if node.declared is not None:
                parallelism, tasks = node.declared
                nodes[id] = replace(node, parallelism=parallelism, tasks=tasks, declared=None)
        return replace(self, nodes=nodes)

    def _scalable(self, id: str, new: int) -> TopologyNode:
        from penstock.topology.validation import suggestion

        node = self.nodes.get(id)
        if node is None:
            raise TopologyError(
                f"topology '{self.name}'",
                f"it has no component '{id}' to scale",
                suggestion(id, self.nodes, "components"),
            )
        where = f"component '{id}' ({node.line})" if node.line else f"component '{id}'"
        if node.is_spout:
            raise TopologyError(
                where,
                "a spout keeps its number of tasks, because positions in its source belong to "
                f"them, so it cannot get {new!r}",
                "Scale the bolts behind it.",
            )
        if not isinstance(new, int) or new < 1:
            raise TopologyError(where, f"parallelism must be a whole number of at least 1, not {new!r}")
        return node


class _Declarer:
    """Options that every component has. Each public method returns the declarer, so calls can be chained."""

    def __init__(self, id: str, component: Component, parallelism: int, line: str) -> None:
        self._id, self._component, self._parallelism, self._line = id, component, parallelism, line
        self._tasks = parallelism
        self._inputs: list[Subscription] = []
        self._tick: float | None = None
        self._max_rate = math.inf
        self._fixed = False
        self._blocking = False
        if isinstance(component, BaseBolt) and component.tick_interval is not None:
            self._set_tick(component.tick_interval)

    def _where(self) -> str:
        return f"component '{self._id}' ({self._line})" if self._line else f"component '{self._id}'"

    def _set_tasks(self, tasks: int) -> None:
        if not isinstance(tasks, int) or tasks < self._parallelism:
            raise TopologyError(
                self._where(),
                f"the number of tasks must be at least the parallelism, {self._parallelism}, not {tasks!r}",
                "Raise set_num_tasks or lower the parallelism.",
            )
        self._tasks = tasks

    def _set_tick(self, seconds: float) -> None:
        if not isinstance(seconds, int | float) or not 0 < seconds < math.inf:
            raise TopologyError(self._where(), f"a tick interval must be greater than 0 s, not {seconds!r}")
        self._tick = float(seconds)

    def node(self) -> TopologyNode:
        declarer = OutputDeclarer(self._id)
        self._component.declare_output_fields(declarer)
        return TopologyNode(
            self._id,
            self._component,
            self._parallelism,
            self._tasks,
            declarer.streams,
            tuple(self._inputs),
            self._tick,
            self._max_rate,
            self._fixed,
            self._blocking,
            self._line,
        )


class SpoutDeclarer(_Declarer):
    """Sets the options of a spout. Returned by ``TopologyBuilder.set_spout``."""

    def set_num_tasks(self, tasks: int) -> SpoutDeclarer:
        """Run more tasks than executors; the tasks are distributed evenly over the executors."""
        self._set_tasks(tasks)
        return self

    def set_blocking(self) -> SpoutDeclarer:
        """Give each executor of the spout a worker of its own, in addition to the setting ``workers``, because its
        calls wait for something: a service, a database, a sleep. They would hold up all that share a worker with
        it."""
        self._blocking = True
        return self

    def set_max_rate(self, rate: float) -> SpoutDeclarer:
        """Limit the tuples per second that all tasks of the spout emit together. ``penstock set`` changes the
        limit while the topology runs."""
        if not isinstance(rate, int | float) or not rate > 0:
            raise TopologyError(
                self._where(),
                f"a rate must be greater than 0 tuples per second, not {rate!r}",
                "For no limit, use math.inf.",
            )
        self._max_rate = float(rate)
        return self


class BoltDeclarer(_Declarer):
    """Sets the inputs and options of a bolt. Returned by ``TopologyBuilder.set_bolt``. Call one grouping method
    per subscribed stream."""

    def set_num_tasks(self, tasks: int) -> BoltDeclarer:
        """Run more tasks than executors; the tasks are distributed evenly over the executors."""
        self._set_tasks(tasks)
        return self

    def set_tick_interval(self, seconds: float) -> BoltDeclarer:
        """Send each task of the bolt a tick tuple at this interval."""
        self._set_tick(seconds)
        return self

    def set_blocking(self) -> BoltDeclarer:
        """Give each executor of the bolt a worker of its own, in addition to the setting ``workers``, because its
        calls wait for something: a service, a database, a sleep. They would hold up all that share a worker with
        it."""
        self._blocking = True
        return self

    def set_fixed(self) -> BoltDeclarer:
        """Exclude the bolt from automatic scaling (``scaling.policy``). It can still be scaled manually."""
        self._fixed = True
        return self

    def grouping(self, component: str, grouping: Grouping, stream: str = DEFAULT_STREAM) -> BoltDeclarer:
        """Subscribe with a grouping object, for example your own subclass of ``CustomGrouping``."""
        if not isinstance(grouping, Grouping):
            raise TopologyError(
                self._where(),
                f"grouping() takes a Grouping object, not {grouping!r}",
                'For a built-in one use its method, for example fields_grouping("words", "word").',
            )
        self._inputs.append(Subscription(component, stream, grouping, _caller()))
        return self

    def shuffle_grouping(self, component: str, stream: str = DEFAULT_STREAM) -> BoltDeclarer:
        """Distribute tuples evenly over the tasks."""
        return self.grouping(component, groupings.Shuffle(), stream)

    def fields_grouping(self, component: str, *fields: str, stream: str = DEFAULT_STREAM) -> BoltDeclarer:
        """Send all tuples with the same values in these fields to the same task."""
        return self.grouping(component, groupings.Fields(*fields), stream)

    def partial_key_grouping(self, component: str, *fields: str, stream: str = DEFAULT_STREAM) -> BoltDeclarer:
        """Assign two candidate tasks to each key; each tuple goes to the one that received fewer tuples."""
        return self.grouping(component, groupings.PartialKey(*fields), stream)

    def all_grouping(self, component: str, stream: str = DEFAULT_STREAM) -> BoltDeclarer:
        """Send a copy of each tuple to every task."""
        return self.grouping(component, groupings.All(), stream)

    def global_grouping(self, component: str, stream: str = DEFAULT_STREAM) -> BoltDeclarer:
        """Send every tuple to the task with the lowest id."""
        return self.grouping(component, groupings.Global(), stream)

    def forward_grouping(self, component: str, stream: str = DEFAULT_STREAM) -> BoltDeclarer:
        """Send every tuple of the task with index i to the task with index i, modulo the number of tasks: the next
        hop of a branch, which is migrated as a whole (``penstock plan``)."""
        return self.grouping(component, groupings.Forward(), stream)

    def none_grouping(self, component: str, stream: str = DEFAULT_STREAM) -> BoltDeclarer:
        """Leave the distribution to Penstock. The same as shuffle grouping."""
        return self.grouping(component, groupings.NoneGrouping(), stream)

    def direct_grouping(self, component: str, stream: str = DEFAULT_STREAM) -> BoltDeclarer:
        """Let the emitter name the receiving task. The stream must be declared direct."""
        return self.grouping(component, groupings.Direct(), stream)

    def local_or_shuffle_grouping(self, component: str, stream: str = DEFAULT_STREAM) -> BoltDeclarer:
        """Send to tasks in the same worker if there are any, otherwise to tasks on the same node, otherwise to all
        tasks. If both components have the same parallelism, they are always fused and tuples pass between
        them in memory."""
        return self.grouping(component, groupings.LocalOrShuffle(), stream)


class TopologyBuilder:
    """Collects spouts and bolts; ``build`` validates them and returns a ``Topology``."""

    def __init__(self) -> None:
        self._declarers: dict[str, _Declarer] = {}

    def set_spout(self, id: str, spout: BaseSpout, parallelism: int = 1) -> SpoutDeclarer:
        """Add a spout that ``parallelism`` executors run."""
        declarer = SpoutDeclarer(*self._checked(id, spout, BaseSpout, parallelism))
        self._declarers[id] = declarer
        return declarer

    def set_bolt(self, id: str, bolt: BaseBolt, parallelism: int = 1) -> BoltDeclarer:
        """Add a bolt that ``parallelism`` executors run. Call the grouping methods of the returned declarer to set
        its inputs."""
        declarer = BoltDeclarer(*self._checked(id, bolt, BaseBolt, parallelism))
        self._declarers[id] = declarer
        return declarer

    def build(self, name: str, settings: Settings | None = None) -> Topology:
        """Validate and return the topology. Raises ``TopologyError`` for the first mistake found."""
        from penstock.topology.validation import validate

        if settings is not None and not isinstance(settings, Settings):
            raise TopologyError(
                f"topology '{name}' ({_caller()})",
                f"its settings are a {type(settings).__name__}, not a Settings",
                'Write Settings(delivery=Delivery("exactly_once")), for example.',
            )
        nodes = {id: declarer.node() for id, declarer in self._declarers.items()}
        topology = Topology(name, _with_control_streams(nodes), settings or Settings())
        validate(topology)
        return topology

    def _checked(
        self, id: str, component: Component, kind: type[Component], parallelism: int
    ) -> tuple[str, Component, int, str]:
        line = _caller()
        where = f"component '{id}' ({line})"
        call = "set_spout" if kind is BaseSpout else "set_bolt"
        check_name(f"component ({line})", "the id of a component", id)
        if id in self._declarers:
            raise TopologyError(
                where,
                f"there is another component '{id}' (at {self._declarers[id]._line})",
                "Rename one of the two.",
            )
        if not isinstance(component, kind):
            other = "set_bolt" if kind is BaseSpout else "set_spout"
            fits_other = isinstance(component, BaseBolt | BaseSpout)
            raise TopologyError(
                where,
                (f"{call} takes an instance of a {'spout' if kind is BaseSpout else 'bolt'} class, not ")
                + (f"the class {component.__name__}" if isinstance(component, type) else repr(component)),
                f"Use {other}."
                if fits_other
                else f"Pass {component.__name__}(), with brackets."
                if isinstance(component, type)
                else "Derive it from Spout, BatchSpout, BasicBolt, RichBolt or BatchBolt.",
            )
        if not isinstance(parallelism, int) or parallelism < 1:
            raise TopologyError(where, f"parallelism must be a whole number of at least 1, not {parallelism!r}")
        return id, component, parallelism, line


def _with_control_streams(nodes: dict[str, TopologyNode]) -> dict[str, TopologyNode]:
    """Subscribe bolts to the ``control_stream`` of the components they read."""
    for id, node in nodes.items():
        stream = node.component.control_stream if isinstance(node.component, BaseBolt) else ""
        sources = [nodes[each.component] for each in node.inputs if stream and each.component in nodes]
        declaring = dict.fromkeys(source.id for source in sources if stream in source.streams)
        given = {(each.component, each.stream) for each in node.inputs}
        more = [
            Subscription(source, stream, groupings.All(), node.line)
            for source in declaring
            if (source, stream) not in given
        ]
        nodes[id] = replace(node, inputs=(*node.inputs, *more))
    return nodes


def _caller() -> str:
    """Return ``file:line`` of the user code that called the builder."""
    here = os.path.dirname(__file__)
    frame = sys._getframe(1)
    while frame.f_back is not None and os.path.dirname(frame.f_code.co_filename) == here:
        frame = frame.f_back
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
