"""The process that forks Spark's Python workers, with everything they need imported before the first fork.

Spark starts it as ``python -m penstock.spark.daemon``. The first tuple of a topology of 24 tasks comes after 4 s
instead of 24 s, at half the memory, because the workers share what was loaded here. What a worker does before our
first line runs is CPU that a running topology lacks while another is started beside it.
"""

from __future__ import annotations

import gc
import importlib
import os
import signal
import sys
import traceback
import zipimport
from pathlib import Path
from typing import Any

from penstock.redaction import redacted
from penstock.spark.exits import LINE
from penstock.spark.safe_path import SAFE_PATH

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
    "penstock.storage.tables",
)


class _QuietTraceback:
    """Stands in for the traceback module inside pyspark's daemon: a pipe that breaks because the query was
    stopped is no news, everything else is printed as always."""

    def __getattr__(self, name: str) -> Any:
        return getattr(traceback, name)

    @staticmethod
    def print_exc(*args: Any, **kwargs: Any) -> None:
        if not isinstance(sys.exc_info()[1], BrokenPipeError | ConnectionError | EOFError):
            sys.stderr.write(redacted(traceback.format_exc()))


class _Signals:
    """Stands in for the signal module inside pyspark's daemon, which lets the kernel forget how its children
    ended. Here the kernel is asked; the driver is told what was not an orderly end (``penstock.spark.exits``)."""

    def __getattr__(self, name: str) -> Any:
        return getattr(signal, name)

    @staticmethod
    def signal(number: int, handler: Any) -> Any:
        return signal.signal(number, _reap if (number, handler) == (signal.SIGCHLD, signal.SIG_IGN) else handler)


def _reap(number: int, frame: Any) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        code = os.waitstatus_to_exitcode(status)
        if code:
            os.write(2, (LINE.format(pid=pid, status=code) + "\n").encode())


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
    # ``python -m`` puts the folder it was started in first, where anyone may have put modules. ``session`` has
    # Python told to leave it out (SAFE_PATH); so this is for a Spark that was started without. The user's programs
    # that workers start are not told.
    if os.environ.pop(SAFE_PATH, None) is None and sys.path[:1] == [os.getcwd()]:
        del sys.path[0]
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
    pyspark.daemon.signal = _Signals()
    pyspark.daemon.manager()


if __name__ == "__main__":
    main()
