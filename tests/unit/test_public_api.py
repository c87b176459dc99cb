"""The documented API: exactly what these packages export. A change here is a change for users. Documentation and
examples may import nothing else from Penstock."""

import ast
import importlib
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import penstock

ROOT = Path(__file__).resolve().parents[2]

PUBLIC = {
    "penstock": [
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
        "Workers",
        "UserCodeError",
        "ValueState",
        "make_plan",
        "submit",
    ],
    "penstock.aggregates": [
        "Count",
        "CountOf",
        "Distinct",
        "FieldMerge",
        "KeyedAggregate",
        "KeyedBolt",
        "KeyedMergeBolt",
        "Max",
        "Mean",
        "Merge",
        "MergeBolt",
        "Min",
        "PartialBolt",
        "Reduce",
        "Sum",
        "TopK",
        "Variance",
        "Window",
        "WindowBolt",
    ],
    "penstock.bolts": [
        "DedupBolt",
        "ShowBolt",
    ],
    "penstock.connectors": [
        "FileEden",
        "FileSpout",
        "KafkaBolt",
        "KafkaEden",
        "KafkaSink",
        "KafkaSpout",
        "KafkaStore",
        "ParquetSink",
        "PostgresSink",
        "SocketSpout",
        "StagedSink",
    ],
    "penstock.control": [
        "ErdmPolicy",
        "ExecutorStream",
        "PlacedExecutor",
        "PlacementNode",
        "PlacementSnapshot",
        "Use",
        "explain",
    ],
    "penstock.persist": [
        "CassandraStore",
        "EmbeddedQueue",
        "HBaseStore",
        "MemcachedQueue",
        "MemoryQueue",
        "Overtaken",
        "ParquetStore",
        "PersistBolt",
        "PersistentQueue",
        "PostgresStore",
        "RedisQueue",
        "SQLiteStore",
        "Store",
        "StoreClient",
        "StoreUnavailable",
    ],
    "penstock.replay": [
        "DiskQueue",
        "Eden",
        "EmbeddedStore",
        "QueueEden",
        "ReadProgress",
        "ReplayQueue",
        "ReplayRecord",
        "ReplaySpout",
        "ReplayStore",
        "Replayer",
        "lost",
    ],
    "penstock.sim": [
        "BENCHMARKS",
        "STRATEGIES",
        "run",
    ],
    "penstock.testing": [
        "CaptureBolt",
        "FeederSpout",
        "LocalRunner",
        "NumberSpout",
        "run_bolt",
        "run_spout",
    ],
    "penstock.testing.servers": [
        "CassandraServer",
        "HBaseServer",
        "KafkaServer",
        "MemcachedServer",
        "PostgresServer",
        "RedisServer",
        "SparkCluster",
        "ZooKeeperServer",
    ],
}


@pytest.mark.parametrize("package", PUBLIC)
def test_the_public_names_are_these(package):
    names = importlib.import_module(package).__all__
    assert sorted(names) == sorted(PUBLIC[package])
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("package", PUBLIC)
def test_every_public_name_is_there(package):
    module = importlib.import_module(package)
    for name in PUBLIC[package]:
        assert getattr(module, name) is not None


@pytest.mark.parametrize("package", PUBLIC)
def test_an_unknown_name_is_an_attribute_error(package):
    assert not hasattr(importlib.import_module(package), "Sprout")


def test_importing_penstock_loads_no_spark():
    code = "import sys, penstock; sys.exit(any(name.split('.')[0] in ('pyspark', 'py4j') for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_connectors_load_no_client_that_is_not_used():
    code = (
        "import sys\nfrom penstock.connectors import FileSpout\n"
        "sys.exit(any(name.split('.')[0] in ('confluent_kafka', 'psycopg') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# ---- what documentation and examples import ----------------------------------------------------------------


def pages():
    return [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md")), *sorted(ROOT.glob("examples/**/*.py"))]


def code_of(path):
    """The Python code in a file: the whole file, or the blocks of a page."""
    if path.suffix == ".py":
        return [path.read_text()]
    return map(textwrap.dedent, re.findall(r"^ *```python\n(.*?)^ *```", path.read_text(), re.S | re.M))


def imported(code):
    """The imports from Penstock as (package, name); a whole module as (module, "")."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "penstock":
            yield from ((node.module, alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((a.name, "") for a in node.names if a.name.partition(".")[0] == "penstock")


@pytest.mark.parametrize("path", pages(), ids=lambda path: str(path.relative_to(ROOT)))
def test_documentation_imports_only_public_names(path):
    hidden = [
        f"{package} {name}".strip()
        for code in code_of(path)
        for package, name in imported(code)
        if package not in PUBLIC or name not in ["", *PUBLIC[package]]
    ]
    assert hidden == []


def test_what_is_exported_at_the_top_is_not_exported_again_elsewhere_as_something_else():
    for package, names in PUBLIC.items():
        for name in set(names) & set(PUBLIC["penstock"]):
            assert getattr(importlib.import_module(package), name) is getattr(penstock, name)
