"""Penstock: Storm topologies in Python on Spark's Real-Time Mode.

The public API is what this package and its sub-packages ``aggregates``, ``bolts``, ``connectors``, ``control``,
``persist``, ``replay``, ``sim``, ``testing`` and ``testing.servers`` export. Everything else may change.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.aggregates import Merge, Reduce
from penstock.bolts import DedupBolt, ShowBolt
from penstock.clock import Clock, SimulatedClock, SystemClock
from penstock.errors import (
    ComponentError,
    ControlRefused,
    EnvironmentFault,
    FieldCountError,
    FieldTypeError,
    FrameError,
    JavaMissing,
    KeyTypeError,
    LoadError,
    MasterUnreachable,
    NotEnoughSlots,
    PenstockError,
    PortInUse,
    SettingError,
    SinkBusy,
    SinkRefused,
    SnapshotCorrupt,
    StateError,
    SystemAway,
    TopologyError,
    TopologyFailed,
    UserCodeError,
)
from penstock.plan.model import Plan
from penstock.plan.planner import make_plan
from penstock.redaction import redact_logs
from penstock.settings import (
    Delivery,
    Flow,
    Lifecycle,
    Migration,
    Monitor,
    Placement,
    Scaling,
    Settings,
    Transport,
    Workers,
)
from penstock.state.maps import MapState
from penstock.state.values import TaskState, ValueState
from penstock.topology.builder import BoltDeclarer, SpoutDeclarer, Topology, TopologyBuilder
from penstock.topology.components import (
    BasicBolt,
    BatchBolt,
    BatchCollector,
    BatchSpout,
    BatchSpoutCollector,
    Collector,
    Conf,
    Context,
    Failure,
    RichBolt,
    RichCollector,
    Source,
    Spout,
    SpoutCollector,
    TransactionalSink,
)
from penstock.topology.groupings import CustomGrouping, Grouping, Router, Targets
from penstock.topology.streams import DEFAULT_STREAM, OutputDeclarer
from penstock.topology.tuples import Tuple

if TYPE_CHECKING:
    from penstock.driver.handle import RunningTopology
    from penstock.spark.submit import submit

__version__ = "0.8.0"

redact_logs()

__all__ = [
    "DEFAULT_STREAM",
    "BasicBolt",
    "BatchBolt",
    "BatchCollector",
    "BatchSpout",
    "BatchSpoutCollector",
    "BoltDeclarer",
    "Clock",
    "Collector",
    "ComponentError",
    "Conf",
    "Context",
    "ControlRefused",
    "CustomGrouping",
    "DedupBolt",
    "Delivery",
    "EnvironmentFault",
    "Failure",
    "FieldCountError",
    "FieldTypeError",
    "Flow",
    "FrameError",
    "Grouping",
    "JavaMissing",
    "KeyTypeError",
    "Lifecycle",
    "LoadError",
    "MapState",
    "MasterUnreachable",
    "Merge",
    "Migration",
    "Monitor",
    "NotEnoughSlots",
    "OutputDeclarer",
    "PenstockError",
    "Placement",
    "Plan",
    "PortInUse",
    "Reduce",
    "RichBolt",
    "RichCollector",
    "Router",
    "RunningTopology",
    "Scaling",
    "SettingError",
    "Settings",
    "ShowBolt",
    "SimulatedClock",
    "SinkBusy",
    "SinkRefused",
    "SnapshotCorrupt",
    "Source",
    "Spout",
    "SpoutCollector",
    "SpoutDeclarer",
    "StateError",
    "SystemAway",
    "SystemClock",
    "Targets",
    "TaskState",
    "Topology",
    "TopologyBuilder",
    "TopologyError",
    "TopologyFailed",
    "TransactionalSink",
    "Transport",
    "Tuple",
    "UserCodeError",
    "ValueState",
    "Workers",
    "make_plan",
    "submit",
]


def __getattr__(name: str) -> Any:
    # Imported on first use, because workers and unit tests start faster without Spark.
    if name == "submit":
        from penstock.spark.submit import submit

        return submit
    if name == "RunningTopology":
        from penstock.driver.handle import RunningTopology

        return RunningTopology
    raise AttributeError(f"module 'penstock' has no attribute '{name}'")
