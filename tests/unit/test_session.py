"""What Spark's session leaves behind, and what is shown of what its JVM prints. Without Spark."""

import io
import os
import shlex

import pytest

from penstock.spark import class_archive, session
from penstock.spark.jvm import Jvm


@pytest.fixture
def said(monkeypatch):
    lines = []
    monkeypatch.setattr(session, "_say", lines.append)
    monkeypatch.setattr(session, "JVM", Jvm())
    return lines


def test_a_jvm_that_was_ended_in_the_middle_of_its_work_prints_no_stack_trace(said):
    session._pump(io.BytesIO(b"a line\n"))
    session.abandon_session()
    session._pump(io.BytesIO(b'Exception in thread "stream execution thread"\n\tat org.apache.spark\n'))
    assert said == ["a line"]


def test_what_workers_and_the_jvm_print_cannot_steer_the_terminal(said, monkeypatch, capsys):
    """Also before a live view is shown, and without one."""
    monkeypatch.setattr(session, "_say", session._to_standard_error)
    session._pump(io.BytesIO(b"\x1b[2Ja\tline\x07\r\n"))
    assert capsys.readouterr().err == "\\x1b[2Ja\tline\\x07\n"


@pytest.mark.parametrize("at_once", [False, True])
def test_temporary_files_of_the_jvm_go_with_the_session(said, tmp_path, monkeypatch, at_once):
    monkeypatch.setattr(session, "_folder", tmp_path / "session of Alice")
    session.session_folder().mkdir()
    (option,) = (
        option
        for option in shlex.split(session._python_conf("local[2]")["spark.driver.extraJavaOptions"])
        if option.startswith("-Djava.io.tmpdir=")
    )
    folder = option.partition("=")[2]
    assert os.path.dirname(folder) == str(session.session_folder())
    open(os.path.join(folder, "blockmgr"), "w").close()
    session.abandon_session(at_once)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("signal", [KeyboardInterrupt, OSError])
def test_an_archive_that_is_not_finished_leaves_the_one_that_is_there(said, tmp_path, monkeypatch, signal):
    archive = tmp_path / "spark.jsa"
    archive.write_text("whole")
    monkeypatch.setattr(class_archive, "archive_path", lambda: archive)

    def submit(topology):
        (option,) = (o for o in shlex.split(class_archive.java_options()) if "ArchiveClassesAtExit" in o)
        with open(option.partition("=")[2], "w") as file:
            file.write("half")
        raise signal

    monkeypatch.setattr("penstock.spark.java.ensure_java", lambda: None)
    monkeypatch.setattr("penstock.spark.submit.submit", submit)
    with pytest.raises(signal):
        class_archive.make_archive()
    assert not session.JVM.wanted, "nobody waits for a JVM that archives classes in vain"
    assert os.listdir(tmp_path) == ["spark.jsa"]
    assert archive.read_text() == "whole"
