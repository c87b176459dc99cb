"""Validation of a topology when it is built. Each check finds one kind of mistake, names the component and says
how to correct it."""

from __future__ import annotations

import difflib
import inspect
import os
from collections.abc import Iterable
from typing import Any

from penstock.errors import TopologyError
from penstock.topology.builder import Subscription, Topology, TopologyNode
from penstock.topology.components import (
    BaseBolt,
    BaseSpout,
    BasicBolt,
    BatchBolt,
    BatchSpout,
    Component,
    RichBolt,
    Spout,
    TransactionalSink,
)
from penstock.topology.groupings import Direct, Fields, Global, Grouping, LocalOrShuffle, PartialKey, Shuffle
from penstock.topology.names import check_name

_CONTRACTS = (
    *(Component, BaseSpout, Spout, BatchSpout),
    *(BaseBolt, BasicBolt, RichBolt, BatchBolt, TransactionalSink),
)
"""The classes whose methods the worker calls."""
_NOT_PLAIN = (
    (inspect.isasyncgenfunction, "an asynchronous generator function"),
    (inspect.iscoroutinefunction, "a coroutine function (async def)"),
    (inspect.isgeneratorfunction, "a generator function (it has a yield)"),
)


def validate(topology: Topology) -> None:
    """Raise ``TopologyError`` for the first mistake found."""
    checks = (_named, _has_spout, _plain_functions, _signatures, _subscriptions, _reads, _reachable, _acyclic)
    for check in (*checks, _plain_without_ticks, _partials_meet, _keys_meet):
        check(topology)
    topology.cautions()  # raises for a component that cannot keep the delivery guarantee


def _named(topology: Topology) -> None:
    if not topology.name:
        raise TopologyError("topology", f"a topology needs a name, not {topology.name!r}")
    check_name("topology", "the name of a topology", topology.name)
    for node in topology.nodes.values():
        for stream in node.streams:
            check_name(_at(node), "a stream's id", stream)


def _plain_functions(topology: Topology) -> None:
    """Reject generator functions and coroutine functions: calling one runs nothing, so its output would be
    lost."""
    for node in topology.nodes.values():
        kind = type(node.component).__name__
        for name in _called(node.component):
            function = getattr(node.component, name, None)
            for test, what in _NOT_PLAIN:
                if test(function):
                    raise TopologyError(
                        _at(node),
                        f"{kind}.{name} must be a plain function that does its work when it is called, not {what}",
                        "Call collector.emit for each tuple instead of yield, and do not use await.",
                    )


def _signatures(topology: Topology) -> None:
    """Reject methods with the wrong parameters: they would fail for every tuple."""
    for node in topology.nodes.values():
        component = type(node.component)
        for name in _called(node.component):
            wanted = next(
                vars(base)[name] for base in component.__mro__ if base in _CONTRACTS and name in vars(base)
            )
            function = getattr(node.component, name, None)
            if not callable(wanted) or _takes(function, _arguments(wanted)):
                continue
            raise TopologyError(
                _at(node),
                f"{component.__name__}.{name} must be declared as {_shown(name, wanted)}, not as "
                f"{_shown(name, function)}{_defined_at(function)}",
                _other_form(name, function),
            )


def _called(component: Component) -> list[str]:
    """The names of the attributes that the worker uses: those of the base classes that the component derives
    from."""
    contracts = [base for base in _CONTRACTS if isinstance(component, base)]
    return sorted({name for base in contracts for name in vars(base) if not name.startswith("_")})


def _takes(function: Any, arguments: int) -> bool:
    """Whether the function can be called with so many arguments. True if Python cannot tell."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return True
    try:
        signature.bind(*[None] * arguments)
    except TypeError:
        return False
    return True


def _arguments(method: Any) -> int:
    return len(inspect.signature(method).parameters) - 1  # without self


def _shown(name: str, function: Any) -> str:
    """The signature as the user wrote it, with self and without types."""
    signature = inspect.signature(getattr(function, "__func__", function))
    bare = [each.replace(annotation=inspect.Parameter.empty) for each in signature.parameters.values()]
    return f"{name}{signature.replace(parameters=bare, return_annotation=inspect.Signature.empty)}"


def _defined_at(function: Any) -> str:
    code = getattr(inspect.unwrap(function), "__code__", None)
    return f" ({os.path.basename(code.co_filename)}:{code.co_firstlineno})" if code else ""


def _other_form(name: str, function: Any) -> str:
    """The hint for a method whose parameters fit another kind of component."""
    for base in (Spout, BatchSpout, BasicBolt, RichBolt, BatchBolt):
        method = vars(base).get(name)
        if method is not None and _takes(function, _arguments(method)):
            return f"Change its parameters, or derive the class from {base.__name__}."
    return "Change its parameters."


def _reads(topology: Topology) -> None:
    for node in topology.nodes.values():
        for subscription in node.data_inputs:
            names = topology.stream(subscription.component, subscription.stream).field_names
            for field in getattr(node.component, "reads", ()):
                if field not in names:
                    raise TopologyError(
                        _at(node, subscription),
                        f"{type(node.component).__name__} reads field '{field}', which its input "
                        f"'{topology.stream(subscription.component, subscription.stream)}' does not have",
                        suggestion(field, names, "fields"),
                    )


def _has_spout(topology: Topology) -> None:
    if not any(node.is_spout for node in topology.nodes.values()):
        raise TopologyError(
            f"topology '{topology.name}'",
            "it has no spout" if topology.nodes else "it has no components",
            "Add a spout with set_spout.",
        )


def _subscriptions(topology: Topology) -> None:
    for node in topology.nodes.values():
        seen = set()
        for subscription in node.inputs:
            _subscription(topology, node, subscription)
            key = (subscription.component, subscription.stream)
            if key in seen:
                raise TopologyError(
                    _at(node, subscription),
                    f"it subscribes twice to stream '{subscription.stream}' of '{subscription.component}'",
                    "Drop one of the two groupings.",
                )
            seen.add(key)


def _subscription(topology: Topology, node: TopologyNode, subscription: Subscription) -> None:
    where = _at(node, subscription)
    source = topology.nodes.get(subscription.component)
    if source is None:
        raise TopologyError(
            where,
            f"it reads from '{subscription.component}', which does not exist",
            suggestion(subscription.component, topology.nodes, "components"),
        )
    stream = source.streams.get(subscription.stream)
    if stream is None:
        raise TopologyError(
            where,
            f"it reads stream '{subscription.stream}' of '{source.id}', which declares "
            + (f"only {', '.join(source.streams)}" if source.streams else "no stream"),
            f"Declare it in {type(source.component).__name__}.declare_output_fields"
            + (
                f", or subscribe with stream={_nearest(subscription.stream, source.streams)!r}."
                if source.streams
                else "."
            ),
        )
    if isinstance(subscription.grouping, Fields) and not subscription.grouping.fields:
        raise TopologyError(
            where,
            f"{subscription.grouping.name} grouping needs at least one field",
            f"Name one of {', '.join(stream.field_names)}.",
        )
    for field in subscription.grouping.key_fields():
        if field not in stream.field_names:
            raise TopologyError(
                where,
                f"{subscription.grouping.name} grouping names field '{field}', which stream "
                f"'{stream}' does not have",
                suggestion(field, stream.field_names, "fields"),
            )
    if isinstance(subscription.grouping, Direct) and not stream.direct:
        raise TopologyError(
            where,
            f"direct grouping needs a direct stream, and '{stream}' is not one",
            "Declare it with direct=True, or use another grouping.",
        )
    if stream.direct and not isinstance(subscription.grouping, Direct):
        raise TopologyError(
            where,
            f"stream '{stream}' is direct and takes direct grouping only, not {subscription.grouping.name}",
            "Use direct_grouping, or declare the stream without direct=True.",
        )


def _reachable(topology: Topology) -> None:
    reached = {node.id for node in topology.nodes.values() if node.is_spout}
    grown = True
    while grown:
        more = {
            node.id
            for node in topology.nodes.values()
            if node.id not in reached and any(i.component in reached for i in node.inputs)
        }
        grown = bool(more)
        reached |= more
    for node in topology.nodes.values():
        if node.id not in reached:
            raise TopologyError(
                _at(node),
                "no spout reaches this bolt: it subscribes to nothing"
                if not node.inputs
                else "no spout reaches this bolt: its inputs are "
                + ", ".join(sorted({i.component for i in node.inputs})),
                "Give it a grouping on a component that is fed, or remove it.",
            )


def _acyclic(topology: Topology) -> None:
    done: set[str] = set()
    path: list[str] = []

    def visit(id: str) -> None:
        if id in path:
            cycle = " -> ".join([*path[path.index(id) :], id])
            raise TopologyError(
                _at(topology.nodes[id]),
                f"the groupings form a cycle, {cycle}",
                "Remove one of these groupings; for feedback write to a queue that a spout reads.",
            )
        if id in done:
            return
        path.append(id)
        for follower in topology.nodes.values():
            if any(i.component == id for i in follower.inputs):
                visit(follower.id)
        path.pop()
        done.add(id)

    for id in topology.nodes:
        visit(id)


def _partials_meet(topology: Topology) -> None:
    """Reject groupings by which partials of one key reach different tasks, where they would never be merged."""
    for node in topology.nodes.values():
        bolt = node.component
        if not isinstance(bolt, BaseBolt) or not bolt.merges_partials or bolt.emits_partials or node.tasks == 1:
            continue
        for subscription in node.inputs:
            if isinstance(subscription.grouping, Shuffle | LocalOrShuffle | PartialKey):
                raise TopologyError(
                    _at(node, subscription),
                    f"its {node.tasks} tasks merge partials, and all partials of a key must reach one "
                    f"task, which {subscription.grouping} grouping on '{subscription.component}' does "
                    "not ensure",
                    "Use fields_grouping on the key, or one task.",
                )


def _keys_meet(topology: Topology) -> None:
    """Reject groupings by which tuples that a bolt compares reach different tasks."""
    for node in topology.nodes.values():
        bolt = node.component
        if not isinstance(bolt, BaseBolt) or not bolt.same_task or node.tasks == 1:
            continue
        first = node.data_inputs[0].grouping
        for subscription in node.data_inputs:
            source, grouping = subscription.component, subscription.grouping
            alike = (type(grouping), grouping.key_fields()) == (type(first), first.key_fields())
            if alike and brings_together(bolt, grouping):
                continue
            fields = ", ".join(map(repr, bolt.same_task))
            raise TopologyError(
                _at(node, subscription),
                (
                    f"tuples that agree in {', '.join(bolt.same_task)} must reach one of its "
                    f"{node.tasks} tasks, which {grouping} grouping on '{source}'"
                )
                + ("" if alike else f" beside {first} grouping on another input")
                + " does not ensure",
                f"Use fields_grouping('{source}', {fields}) for every input, or one task.",
            )


def brings_together(component: Component, grouping: Grouping) -> bool:
    """Whether a grouping sends all tuples that agree in the bolt's ``same_task`` fields to the same task. Compares
    exact types, because a user's subclass may route differently."""
    if not isinstance(component, BaseBolt) or not component.same_task:
        return True
    if type(grouping) is Fields:
        return set(grouping.key_fields()) <= set(component.same_task)
    return type(grouping) is Global


def _plain_without_ticks(topology: Topology) -> None:
    for node in topology.nodes.values():
        if node.tick_interval and getattr(node.component, "plain_tuples", False):
            raise TopologyError(
                _at(node),
                f"it has plain_tuples and a tick interval of {node.tick_interval:g} s, but could "
                "not tell ticks from tuples",
                "Leave out plain_tuples, or the interval.",
            )


def _at(node: TopologyNode, subscription: Subscription | None = None) -> str:
    line = (subscription.line if subscription else "") or node.line
    return f"component '{node.id}' ({line})" if line else f"component '{node.id}'"


def _nearest(name: str, known: Iterable[str]) -> str:
    known = list(known)
    return (difflib.get_close_matches(name, known, 1) or known)[0]


def suggestion(name: str, known: Iterable[str], what: str) -> str:
    """The hint for an unknown name: the most similar known name, or the list of all names."""
    known = list(known)
    similar = difflib.get_close_matches(name, known, 1)
    return f"Did you mean '{similar[0]}'?" if similar else f"The {what} are: {', '.join(known)}."
