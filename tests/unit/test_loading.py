"""Finding the topology in a user's file."""

import sys
from textwrap import dedent

import pytest

from penstock import LoadError, TopologyError
from penstock.cli.loading import load_again, load_topology
from penstock.cli.main import main
from penstock.interrupts import Interrupted

GOOD = """\
    from penstock import TopologyBuilder
    from penstock.testing import FeederSpout

    def made(name):
        builder = TopologyBuilder()
        builder.set_spout("words", FeederSpout("word"))
        return builder.build(name)
"""


@pytest.fixture
def write(tmp_path, monkeypatch, request):
    """Write a file beside others of the test; import leaves no traces for the next one."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = set(sys.modules)

    def write(text, name="shop_under_test.py"):
        path = tmp_path / name
        path.write_text(dedent(GOOD) + dedent(text))
        return path

    yield write
    for name in set(sys.modules) - before:
        if name.endswith("_under_test"):
            del sys.modules[name]


LINES = len(dedent(GOOD).splitlines())  # of what stands before each test's own text


def refused(target):
    with pytest.raises(LoadError) as caught:
        load_topology(str(target))
    assert caught.value.exit_code == 2
    return caught.value


def test_the_object_called_topology(write):
    assert load_topology(str(write("topology = made('shop')\nother = made('other')"))).name == "shop"


def test_the_only_topology_there_is(write):
    assert load_topology(str(write("anything = made('shop')"))).name == "shop"


def test_a_named_object(write):
    path = write("one = made('first')\ntwo = made('second')")
    assert load_topology(f"{path}:two").name == "second"


def test_a_function(write):
    path = write("def build():\n    return made('by function')")
    assert load_topology(f"{path}:build").name == "by function"


def test_a_function_called_topology(write):
    assert load_topology(str(write("def topology():\n    return made('made')"))).name == "made"


def test_a_builder_gets_the_file_s_name(write):
    path = write("builder = TopologyBuilder()\nbuilder.set_spout('s', FeederSpout('x'))")
    assert load_topology(f"{path}:builder").name == "shop_under_test"


def test_neighbours_can_be_imported(write):
    write("NAME = 'from a neighbour'", "names_under_test.py")
    path = write("from names_under_test import NAME\ntopology = made(NAME)")
    assert load_topology(str(path)).name == "from a neighbour"


def test_a_missing_file(tmp_path):
    error = refused(tmp_path / "nothing.py")
    assert str(error) == f"{tmp_path / 'nothing.py'}: there is no such file."


def test_a_missing_file_with_a_near_name(write, tmp_path):
    path = write("")
    assert f"Did you mean {path}?" in str(refused(tmp_path / "shop_under_tset.py"))


def test_no_python_file(tmp_path):
    (tmp_path / "notes.txt").write_text("hello")
    assert "it is not a Python file: its name ends with .txt. Name it something.py." in str(
        refused(tmp_path / "notes.txt")
    )


def test_a_syntax_error_names_the_line(write):
    path = write("x = 1\nif x\n    pass")
    assert str(refused(path)) == f"{path}:{LINES + 2}: it is not valid Python (expected ':')."


def test_a_syntax_error_in_a_neighbour_names_the_neighbour(write):
    neighbour = write("if x\n", "broken_under_test.py")
    path = write("\n\n\n\nimport broken_under_test")
    error = refused(path)
    assert f"{neighbour.name}:{LINES + 1}" in error.where, error


def test_an_exception_at_import_names_the_line(write):
    path = write("x = 1\n\nx / 0")
    assert str(refused(path)) == (
        f"{path}:{LINES + 3}: the file cannot be imported (ZeroDivisionError: division by zero)."
    )


def test_an_exception_deeper_down_names_the_user_s_line(write):
    path = write("import json\njson.loads('nonsense')")
    assert refused(path).where == f"{path}:{LINES + 2}"


def test_a_relative_path_names_the_line_as_well(write, tmp_path, monkeypatch):
    path = write("x / 0")
    monkeypatch.chdir(tmp_path)
    assert refused(path.name).where == f"{path.name}:{LINES + 1}"


def test_a_misspelt_method_is_corrected(write):
    error = refused(write("from penstock import TopologyBuilder\nTopologyBuilder().set_spuot('x', None)"))
    assert "has no attribute 'set_spuot'" in error.problem
    assert error.hint == "Did you mean set_spout?"


def test_a_missing_module_says_so(write):
    error = refused(write("import surely_not_installed"))
    assert "ModuleNotFoundError" in error.problem
    assert error.hint == "Install surely_not_installed, or put it in the file's folder."


def test_an_exception_in_the_function(write):
    path = write("def topology():\n    return made(UNKNOWN)")
    error = refused(path)
    assert error.where == f"{path}:{LINES + 2}"
    assert "NameError: name 'UNKNOWN'" in error.problem


def test_no_topology(write):
    path = write("")
    assert str(refused(path)).startswith(
        f"{path}: it must contain one topology, but it contains none. Write topology = "
    )


def test_two_topologies(write):
    error = refused(write("one = made('a')\ntwo = made('b')"))
    assert error.problem == "it must contain one topology, but it contains 2: one, two"
    assert "FILE:OBJECT" in error.hint


def test_a_typo_in_the_object(write):
    path = write("topology = made('a')")
    assert str(refused(f"{path}:topolgy")) == f"{path}: it has no object 'topolgy'. Did you mean topology?"


def test_an_object_unlike_anything(write):
    assert "has no object 'zzzz'. Write topology =" in str(refused(f"{write('')}:zzzz"))


def test_an_object_that_is_no_topology(write):
    path = write("number = 42")
    error = refused(f"{path}:number")
    assert error.where == f"{path}:number"
    assert error.problem == "42 is neither a topology nor a function that returns one"


def test_a_wrong_topology_is_the_topology_s_error(write):
    path = write("builder = TopologyBuilder()\ntopology = builder.build('empty')")
    with pytest.raises(TopologyError, match="topology 'empty': it has no components"):
        load_topology(str(path))


def test_plan_prints_text_and_graph(write, capsys):
    path = write("topology = made('shop')")
    assert main(["plan", str(path)]) == 0
    both = capsys.readouterr().out
    assert both.startswith("topology shop: 1 stage, 1 worker (limit ")
    assert "graph LR" in both
    assert main(["plan", str(path), "--format", "mermaid"]) == 0
    assert capsys.readouterr().out.startswith("graph LR")


def test_plan_takes_settings_as_run_does(write, capsys):
    path = write("topology = made('shop')")
    words = ["plan", str(path), "--format", "text", "--set", "delivery=at_least_once"]
    assert main([*words, "--set", "delivery.ackers=4"]) == 0
    assert "ackers\n  4" in capsys.readouterr().out
    assert main([*words, "--set", "delivery.acker=4"]) == 2
    assert "Did you mean delivery.ackers?" in capsys.readouterr().err


def test_plan_of_nothing_ends_with_code_two(tmp_path, capsys):
    assert main(["plan", str(tmp_path / "none.py")]) == 2
    assert capsys.readouterr().err.startswith(f"penstock: {tmp_path / 'none.py'}: there is no such file")


@pytest.mark.parametrize("raised", ["sys.exit(3)", "raise KeyboardInterrupt", "raise GeneratorExit"])
def test_a_file_cannot_end_the_process_that_loads_it(write, raised):
    path = write(f"import sys\n{raised}")
    with pytest.raises(LoadError, match=rf"shop_under_test.py:{LINES + 2}: the file cannot be imported"):
        load_topology(str(path))


def test_a_file_that_exits_says_what_to_do(write):
    path = write("import sys\nsys.exit(3)")
    with pytest.raises(
        LoadError, match=r"\(SystemExit: 3\)\. Put the statements that run the file as a program under"
    ):
        load_topology(str(path))


def test_a_function_that_exits(write):
    path = write("def topology():\n    raise SystemExit")
    with pytest.raises(LoadError, match="SystemExit"):
        load_topology(str(path))


def test_a_replacement_file_that_exits_leaves_the_modules_as_they_were(write):
    path = write("topology = made('first')")
    load_topology(str(path))
    before = sys.modules["shop_under_test"]
    write("import sys\nsys.exit(0)")
    with pytest.raises(LoadError):
        load_again(str(path))
    assert sys.modules["shop_under_test"] is before


def test_ctrl_c_while_a_file_is_loaded_is_no_error_of_the_file(write):
    path = write("from penstock.interrupts import Interrupted\nraise Interrupted(2)")
    with pytest.raises(Interrupted):
        load_topology(str(path))


def test_a_folder_is_not_a_topology(write, tmp_path):
    path = write("topology = made('t')")
    with pytest.raises(LoadError) as caught:
        load_topology(str(tmp_path))
    assert str(caught.value) == (
        f"{tmp_path}: it is a folder with shop_under_test.py, not a Python file. "
        f"Name one of its files, for example {path}."
    )


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--seconds", "soon"], "argument --seconds: soon is not a number of seconds above 0"),
        (["--seconds", "0"], "argument --seconds: 0 is not a number of seconds above 0"),
        (["--seconds", "nan"], "argument --seconds: nan is not a number of seconds above 0"),
        (["--port", "70000"], "argument --port: 70000 is not a port: a whole number from 0 to 65535"),
        (["--port", "http"], "argument --port: http is not a port: a whole number from 0 to 65535"),
        (["--http", "-1"], "argument --http: -1 is not a port: a whole number from 0 to 65535"),
    ],
)
def test_a_wrong_number_on_the_command_line_is_named(capsys, words, text):
    with pytest.raises(SystemExit) as end:
        main(["run", "x.py", *words])
    assert end.value.code == 2
    assert text in capsys.readouterr().err
