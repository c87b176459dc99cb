"""The process Spark's Python workers are forked from: what it has loaded, and what that leaves a worker to do."""

import importlib.util
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

PYSPARK = Path(importlib.util.find_spec("pyspark").origin).parent
LIBRARIES = PYSPARK / "python" / "lib"


def run(code, path=LIBRARIES / "pyspark.zip"):
    """As Spark starts it: with pyspark's zips before everything else."""
    zips = os.pathsep.join(map(str, [path, *LIBRARIES.glob("py4j*.zip")]))
    code = "import sys, time, importlib, zipimport\nfrom penstock.spark import daemon\n" + textwrap.dedent(code)
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": zips},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_pyspark_is_loaded_as_it_stands_beside_the_zip():
    before, after, same = run(
        """
        assert "pyspark" not in sys.modules
        before = list(sys.path)
        daemon._import_unpacked_pyspark()
        import pyspark.worker
        print(any(entry.endswith("pyspark.zip") for entry in before), pyspark.worker.__file__, sys.path == before)
        """
    )
    assert before == "True", "else this shows nothing"
    assert Path(after) == PYSPARK / "worker.py"
    assert same == "True", "what travels with a topology is found where it was"


def test_a_zip_that_stands_alone_is_used(tmp_path):
    alone = tmp_path / "a" / "b" / "c" / "pyspark.zip"
    alone.parent.mkdir(parents=True)
    alone.symlink_to(LIBRARIES / "pyspark.zip")
    (found,) = run(
        """
        daemon._import_unpacked_pyspark()
        import pyspark
        print(pyspark.__file__)
        """,
        alone,
    )
    assert found.startswith(str(alone))


@pytest.mark.parametrize("unpacked", [True, False])
def test_a_worker_need_not_read_zips_anew(unpacked):
    """Workers begin with ``importlib.invalidate_caches()``."""
    before, after, found = run(
        f"""
        if {unpacked}:
            daemon._import_unpacked_pyspark()
        for module in daemon._PRELOAD:
            importlib.import_module(module)

        def zips():
            return sum(isinstance(each, zipimport.zipimporter) for each in sys.path_importer_cache.values())

        before = zips()
        daemon._forget_zips()
        after = zips()
        importlib.invalidate_caches()
        import pyspark.cloudpickle.cloudpickle_fast, pyspark.join  # what was not loaded is still found
        print(before, after, "pyspark.join" in sys.modules)
        """
    )
    assert int(before) > 0
    assert int(after) == 0
    assert found == "True"
