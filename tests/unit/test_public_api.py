"""The public names, pinned: a change here is a change for users."""

import subprocess
import sys

import penstock
import penstock.merging
import penstock.testing

PUBLIC = [
    "DEFAULT_STREAM",
    "BasicBolt",
    "BatchBolt",
    "BatchCollector",
    "BatchSpout",
    "BoltDeclarer",
    "Clock",
    "Collector",
    "ComponentError",
    "Conf",
    "Context",
    "ControlRefused",
    "CustomGrouping",
    "DedupBolt",
    "EnvironmentFault",
    "FieldCountError",
    "FieldTypeError",
    "FrameError",
    "Grouping",
    "JavaMissing",
    "LoadError",
    "MasterUnreachable",
    "Merge",
    "NotEnoughSlots",
    "OutputDeclarer",
    "PenstockError",
    "Plan",
    "PortInUse",
    "Reduce",
    "RichBolt",
    "RichCollector",
    "Router",
    "RunningTopology",
    "SettingError",
    "Settings",
    "ShowBolt",
    "SimulatedClock",
    "SinkRefused",
    "SnapshotCorrupt",
    "Source",
    "Spout",
    "SpoutCollector",
    "SpoutDeclarer",
    "StateError",
    "SystemClock",
    "Targets",
    "Topology",
    "TopologyBuilder",
    "TopologyError",
    "TopologyFailed",
    "Tuple",
    "UserCodeError",
    "make_plan",
    "submit",
    "BatchSpoutCollector",
    "Failure",
    "MapState",
    "TaskState",
    "TransactionalSink",
    "ValueState",
]


def test_the_public_names_are_these():
    assert sorted(penstock.__all__) == sorted(PUBLIC)
    assert len(set(penstock.__all__)) == len(penstock.__all__)


def test_every_public_name_is_there():
    for name in penstock.__all__:
        assert getattr(penstock, name) is not None


def test_the_names_of_testing():
    assert penstock.testing.__all__ == [
        "CaptureBolt",
        "FeederSpout",
        "LocalRunner",
        "NumberSpout",
        "run_bolt",
        "run_spout",
    ]
    assert all(hasattr(penstock.testing, name) for name in penstock.testing.__all__)


def test_the_names_of_merging():
    assert penstock.merging.__all__ == [
        "Count",
        "CountOf",
        "Distinct",
        "Max",
        "Mean",
        "Merge",
        "Min",
        "Sum",
        "TopK",
        "Variance",
    ]
    assert all(hasattr(penstock.merging, name) for name in penstock.merging.__all__)


def test_an_unknown_name_is_an_attribute_error():
    assert not hasattr(penstock, "Sprout")


def test_importing_penstock_loads_no_spark():
    code = "import sys, penstock; sys.exit(any(name.split('.')[0] in ('pyspark', 'py4j') for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
