"""The process that forks Spark's Python workers. It imports all that workers need before the first fork.

Spark starts it as ``python -m penstock.spark.daemon``. Since the workers share the imported modules, the first
tuple of a topology with 24 tasks arrives after 4 s instead of 24 s, and the workers need half the memory. A
running topology also loses less CPU time while another one is started beside it.
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

# Many workers run on one machine. Libraries that start one thread per core would compete for the cores.
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
    """Replaces the traceback module inside pyspark's daemon. It does not print errors of broken connections, which
    occur whenever a query is stopped."""

    def __getattr__(self, name: str) -> Any:
        return getattr(traceback, name)

    @staticmethod
    def print_exc(*args: Any, **kwargs: Any) -> None:
        if not isinstance(sys.exc_info()[1], BrokenPipeError | ConnectionError | EOFError):
            sys.stderr.write(redacted(traceback.format_exc()))


class _Signals:
    """Replaces the signal module inside pyspark's daemon. pyspark ignores SIGCHLD, so that the exit status of
    workers is lost. This installs ``_reap`` instead, which reports unsuccessful exits to the driver
    (``penstock.spark.exits``)."""

    def __getattr__(self, name: str) -> Any:
        return getattr(signal, name)

    @staticmethod
    def signal(number: int, handler: Any) -> Any:
        return signal.signal(number, _reap if (number, handler) == (signal.SIGCHLD, signal.SIG_IGN) else handler)


def _reap(number: int, frame: Any) -> None:
    """Handle SIGCHLD: write a line to standard error for each worker that ended with a non-zero status."""
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
    """Import pyspark from its folder instead of ``pyspark.zip``, which Spark puts on the path. The zip contains
    only sources; the folder has the same modules compiled, and they load in half the time."""
    zipped = next((Path(entry) for entry in sys.path if Path(entry).name == "pyspark.zip"), None)
    if zipped is None:
        return
    for root in zipped.parents[1:4:2]:  # in a Spark distribution; as installed by pip
        if (root / "pyspark" / "__init__.py").exists():
            sys.path.insert(0, str(root))
            try:
                importlib.import_module("pyspark")
            finally:
                sys.path.remove(str(root))
            return


def _forget_zips() -> None:
    """Remove zip files from the import cache. Each worker calls ``importlib.invalidate_caches()`` at its start,
    which reads every cached zip again, once for each package in it. That costs 0.15 s of CPU per worker, although
    the zips do not change."""
    for path, finder in list(sys.path_importer_cache.items()):
        if isinstance(finder, zipimport.zipimporter):
            del sys.path_importer_cache[path]


def main() -> None:
    """Import the modules, and run pyspark's daemon until Spark ends it."""
    # ``python -m`` puts the current folder first on the path, where other users may have put modules. ``session``
    # sets SAFE_PATH to prevent that; for a Spark session that was opened without it, the folder is removed here.
    # The variable is removed so that programs started by workers do not inherit it.
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
    gc.freeze()  # excludes the loaded modules from garbage collection, which would copy their shared pages
    import pyspark.daemon

    pyspark.daemon.traceback = _QuietTraceback()
    pyspark.daemon.signal = _Signals()
    pyspark.daemon.manager()


if __name__ == "__main__":
    main()
