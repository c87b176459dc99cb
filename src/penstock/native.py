"""The native form of the code that runs once for every tuple (``native/native.c``). Where it is not available,
Penstock does the same in pure Python."""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import os
import sys
import tempfile
import zipimport
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, cast

_NAME = "penstock._native"
PURE = "PENSTOCK_PURE"
"""The environment variable that selects pure Python, if it is neither empty nor 0."""


class NativeForm(Protocol):
    """What the extension module contains."""

    SOURCE: str
    """A hash of the C source from which it was built."""

    def make_emit(
        self,
        pure: Callable[..., None],
        columns: Sequence[list[Any]],
        stream: str,
        keyword: str,
        noted: list[Any] | None = None,
        note_none: bool = False,
    ) -> Callable[..., None]:
        """Make an ``emit(values, stream=..., keyword=...)`` that appends the values to ``columns`` if they are a
        list or a tuple of the right length for ``stream``, and calls ``pure`` with the same arguments otherwise.
        It appends the third argument to ``noted``, unless it is None and ``note_none`` is false. All lists must
        stay the same objects."""

    def Rows(self, kind: type[Any], columns: Sequence[list[Any]]) -> Iterator[Any]:  # noqa: N802 - a class in C
        """Iterate over the rows of the columns as instances of ``kind``, a subclass of tuple. An instance that
        nobody else holds is used again. ``operator.length_hint`` returns the number of rows that are not yet
        read."""

    def passes(self, values: list[Any], kinds: type[Any] | frozenset[type[Any]]) -> bool:
        """Whether all values have this type and fit a column that is declared with it, or are None; or whether the
        type of each value is one of these types."""

    def hash_bytes(self, offsets: Any, data: Any) -> bytes:
        """The hash of each value of an Arrow column of texts or bytes, as ``topology.hashing`` defines it.
        ``offsets``: 64-bit integers, one more than there are values."""

    def order_by_target(self, hashes: Any, count: int) -> tuple[bytes, list[tuple[int, int, int]]]:
        """Sort rows by their target, ``hash % count``. Returns the rows as 64-bit integers, in order for each
        target, and each target that has rows with the beginning and the end of these."""

    def distribute(
        self, known: dict[Any, int], keys: list[Any], columns: tuple[list[Any], ...], count: int
    ) -> list[tuple[int, bytes, list[list[Any]]]] | None:
        """Divide the rows of ``columns`` among ``count`` targets, by the target that ``known`` has for the key of
        each row. Returns each target that has rows, with the indices of these rows as 64-bit integers and with its
        part of each column. None if a key is not known. The keys must have plain types, whose comparison runs no
        code of users."""


def load() -> NativeForm | None:
    """Import the extension module. None if pure Python is selected, or if there is no module for this version of
    Python and this architecture."""
    if os.environ.get(PURE, "") not in ("", "0"):
        return None
    try:
        return cast(NativeForm, importlib.import_module(_NAME))
    except ImportError:
        return _load_from_zip()


def _load_from_zip() -> NativeForm | None:
    """Nodes that do not have Penstock installed import it from a zip file, from which Python does not import
    extension modules. The module is copied to a temporary file for the time of its import."""
    loader = __spec__.loader
    if not isinstance(loader, zipimport.zipimporter):
        return None
    suffix = importlib.machinery.EXTENSION_SUFFIXES[0]
    try:
        data = loader.get_data(os.path.join(loader.archive, "penstock", f"_native{suffix}"))
        with tempfile.NamedTemporaryFile(prefix="penstock-", suffix=suffix) as file:  # readable by this user only
            file.write(data)
            file.flush()
            spec = importlib.util.spec_from_file_location(_NAME, file.name)
            assert spec is not None and spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
    except (ImportError, OSError):  # another version of Python, or a folder from which nothing may be executed
        return None
    sys.modules[_NAME] = module
    return cast(NativeForm, module)


FORM: NativeForm | None = load()
