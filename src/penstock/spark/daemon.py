"""The process that forks Spark's Python workers, with everything they need imported before the first fork.

Spark starts it as ``python -m penstock.spark.daemon``. The first tuple of a topology of 24 tasks comes after 4 s
instead of 24 s, at half the memory, because the workers share what was loaded here.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
import traceback
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


def main() -> None:
    # ``python -m`` puts the folder it was started in first. What travels with a topology comes before it: files
    # there may have changed since.
    if sys.path[:1] == [os.getcwd()]:
        sys.path.append(sys.path.pop(0))
    for module in _PRELOAD:
        try:
            importlib.import_module(module)
        except ImportError as error:
            sys.stderr.write(f"penstock daemon: cannot import {module}: {error}\n")
    gc.collect()
    gc.freeze()  # what is loaded now stays: the collector need not look at it, nor copy its pages
    import pyspark.daemon

    pyspark.daemon.traceback = _QuietTraceback()
    pyspark.daemon.manager()


if __name__ == "__main__":
    main()
