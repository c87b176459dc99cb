"""The process that forks Spark's Python workers, with everything they need imported before the first fork.

Spark starts it as ``python -m penstock.spark.daemon``. The first tuple of a topology of 24 tasks comes after 4 s
instead of 24 s, at half the memory, because the workers share what was loaded here. What a worker does before our
first line runs is CPU that a running topology lacks while another is started beside it.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
import traceback
import zipimport
from pathlib import Path
from typing import Any

# A worker is one of many on its machine; libraries that start a thread per core would fight over them.
for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(name, "1")

_PRELOAD = (
    "numpy",
    "pandas",
    "pyarrow",
    "pyarrow.compute",
    "pyarrow.ipc",
    "pyspark.worker",
    "pyspark.sql.pandas.serializers",
    "pyspark.sql.pandas.types",
    "pyspark.sql.conversion",
    "penstock.spark.stage",
    "penstock.persist",
    "penstock.connectors.tables",
)


class _QuietTraceback:
    """Stands in for the traceback module inside pyspark's daemon: a pipe that breaks because the query was
    stopped is no news, everything else is printed as always."""

    def __getattr__(self, name: str) -> Any:
        return getattr(traceback, name)

    @staticmethod
    def print_exc(*args: Any, **kwargs: Any) -> None:
        if not isinstance(sys.exc_info()[1], BrokenPipeError | ConnectionError | EOFError):
            traceback.print_exc(*args, **kwargs)


def _import_unpacked_pyspark() -> None:
    """Spark has ``pyspark.zip`` on the path, which holds sources only; the same modules stand near it, compiled.
    To load those takes half the time."""
    zipped = next((Path(entry) for entry in sys.path if Path(entry).name == "pyspark.zip"), None)
    if zipped is None:
        return
    for root in zipped.parents[1:4:2]:  # in Spark's own folder; as pip installs it
        if (root / "pyspark" / "__init__.py").exists():
            sys.path.insert(0, str(root))
            try:
                importlib.import_module("pyspark")
            finally:
                sys.path.remove(str(root))
            return


def _forget_zips() -> None:
    """Each worker begins with ``importlib.invalidate_caches()``, for which every zip on the path is read anew,
    once for each package in it: 0.15 s of CPU a worker. Zips do not change under us."""
    for path, finder in list(sys.path_importer_cache.items()):
        if isinstance(finder, zipimport.zipimporter):
            del sys.path_importer_cache[path]


def main() -> None:
    # ``python -m`` puts the folder it was started in first. What travels with a topology comes before it: files
    # there may have changed since.
    if sys.path[:1] == [os.getcwd()]:
        sys.path.append(sys.path.pop(0))
    _import_unpacked_pyspark()
    for module in _PRELOAD:
        try:
            importlib.import_module(module)
        except ImportError as error:
            sys.stderr.write(f"penstock daemon: cannot import {module}: {error}\n")
    _forget_zips()
    gc.collect()
    gc.freeze()  # what is loaded now stays: the collector need not look at it, nor copy its pages
    import pyspark.daemon

    pyspark.daemon.traceback = _QuietTraceback()
    pyspark.daemon.manager()


if __name__ == "__main__":
    main()
