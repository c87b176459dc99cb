"""``penstock.submit``: runs a topology on Spark. Joins the driver with its engine."""

from __future__ import annotations

import contextlib
import logging
import threading

from penstock.driver.coordinator import Coordinator
from penstock.driver.deployment import make_deployment
from penstock.driver.handle import RunningTopology
from penstock.driver.kept_numbers import as_left, kept_texts
from penstock.driver.lease_thread import Lease
from penstock.driver.operator import Operator
from penstock.driver.retrying import retried
from penstock.driver.steps import CHECK_INTERVAL
from penstock.driver.supervisor import Supervisor
from penstock.errors import SettingError
from penstock.protocol.message_board import check_message_board
from penstock.spark.engine import SparkEngine
from penstock.spark.session import open_session, reachable_address
from penstock.state import savepoints
from penstock.state.store import StateStore
from penstock.topology.builder import Topology

log = logging.getLogger("penstock.driver")


def submit(
    topology: Topology,
    master: str | None = None,
    host: str | None = None,
    port: int = 0,
    savepoint: str | None = None,
    fresh: bool = False,
    take_over: bool = False,
) -> RunningTopology:
    """Run a topology on Spark. Returns once its spouts emit.

    ``master`` is as for Spark; without one the topology runs on this machine. The driver listens for its workers
    on ``host``, by default the address of this machine that the master's nodes can reach, and on ``port``, by
    default any free one. With at-least-once or exactly-once delivery the topology continues from the last
    committed epoch in its state directory; with ``savepoint`` (a path or URL) it starts from that savepoint
    instead, and with ``fresh`` from nothing. Bolts that were scaled keep their parallelism (setting
    ``scaling.keep``), except with ``fresh``. Raises ``AlreadyRunning`` if another driver runs the topology on the
    same state directory; with ``take_over`` that driver is ended instead.
    """
    settings = topology.settings
    for component, text in topology.cautions():
        log.warning("component '%s': %s", component, text)
    check_message_board(settings.flow.board, settings.flow.mode)
    if savepoint:
        _check_savepoint(topology, savepoint)
    with contextlib.ExitStack() as opened:
        lease = _lease(topology, take_over)
        if lease is not None:
            opened.callback(lease.release)
            if not fresh:
                patience = settings.lifecycle.start_timeout
                topology = retried(lambda: as_left(topology, savepoint), patience, threading.Event().wait)
        spark = open_session(master)
        engine = SparkEngine(spark)
        opened.callback(engine.close)
        supervisor = _supervisor(
            topology, engine, host or reachable_address(spark.sparkContext.master), port, lease
        )
        opened.callback(supervisor.server.stop)
        opened.callback(supervisor.monitor.close)
        _prepare(supervisor, savepoint, fresh)
        for component, text in kept_texts(topology).items():
            supervisor.runs.current.bus.note("scaling", component, text)
        running = RunningTopology(supervisor)
        supervisor.server.operator = Operator(running)
        opened.pop_all()  # from here on, the supervisor closes everything, also if the start fails
    supervisor.start(supervisor.supervise)
    return running


def _supervisor(topology: Topology, engine: SparkEngine, host: str, port: int, lease: Lease | None) -> Supervisor:
    owner = None if lease is None else lease.owner
    _wait_for_nodes(topology, engine)
    nodes = len(engine.nodes()) if topology.settings.placement.spares != 0 else 0
    deployment = make_deployment(topology, engine, None, nodes, owner)
    return Supervisor(deployment, engine, Coordinator(host, port), lease)


def _wait_for_nodes(topology: Topology, engine: SparkEngine) -> None:
    """Wait for the nodes on which slots are kept free, or whose cores determine the number of workers."""
    settings = topology.settings
    if settings.placement.spares != 0:
        engine.take_nodes_back()  # another topology of this session may have released some
    elif settings.workers.count:
        return
    waited, never = 0.0, threading.Event()
    while not engine.nodes_settled() and waited < settings.lifecycle.start_timeout:
        never.wait(CHECK_INTERVAL)
        waited += CHECK_INTERVAL


def _prepare(supervisor: Supervisor, savepoint: str | None, fresh: bool) -> None:
    """Replace the state that the topology begins with, if a savepoint or a fresh start is requested."""
    run = supervisor.runs.current
    state = run.deployment.state
    if run.keeps_state and savepoint:
        supervisor.runs.ask_store(lambda: state.adopt(StateStore(savepoint)))
    elif run.keeps_state and fresh:
        supervisor.runs.ask_store(state.clear)


def _check_savepoint(topology: Topology, savepoint: str) -> None:
    """Check that the savepoint can be used, before Spark is started and the state directory is claimed, so that a
    wrong path is reported at once. Raises ``SettingError`` or ``StateError``."""
    settings = topology.settings
    if settings.delivery.guarantee == "at_most_once":
        raise SettingError(
            "setting delivery",
            f"with {settings.delivery.guarantee} a topology cannot start from a savepoint",
            "Use --set delivery=exactly_once or at_least_once.",
        )
    retried(
        lambda: savepoints.find(StateStore(savepoint)), settings.lifecycle.start_timeout, threading.Event().wait
    )


def _lease(topology: Topology, take_over: bool) -> Lease | None:
    """Take the lease on the topology's state directory, before Spark is started. None if the topology keeps no
    state. Raises ``AlreadyRunning`` if another driver has the lease."""
    settings = topology.settings
    if settings.delivery.guarantee == "at_most_once":
        return None
    lease = Lease(StateStore(settings.delivery.state_dir).child(topology.name), topology.name)
    retried(lambda: lease.take(take_over), settings.lifecycle.start_timeout, threading.Event().wait)
    return lease
