"""A folder of Parquet files on a local disk or behind an fsspec URL, as sinks and persistent stores write it."""

from __future__ import annotations

import os
import posixpath
import urllib.parse
from collections.abc import Iterator, Sequence

import pyarrow as pa
from fsspec.implementations.local import LocalFileSystem

from penstock.filesystems import open_url
from penstock.storage.segments import sync_folder

_NULL = "__HIVE_DEFAULT_PARTITION__"  # the name that Hive, Spark and pyarrow use for a null value


class ParquetFolder:
    """The file system and the path of a folder that results are written to. Its methods raise ``OSError``, or an
    exception of the client of an object store."""

    def __init__(self, url: str) -> None:
        self.files, path = open_url(url)
        self.root = path.rstrip("/")
        self.is_local = isinstance(self.files, LocalFileSystem)

    def path(self, name: str) -> str:
        """The full path of a name below the folder."""
        return posixpath.join(self.root, name)

    def make(self, path: str) -> None:
        """Create a folder below this one unless it exists. Each level becomes durable in its parent folder."""
        if self.files.isdir(path):
            return
        self.files.makedirs(path, exist_ok=True)
        while len(path) > len(self.root):
            path = posixpath.dirname(path)
            self.sync(path)

    def sync(self, path: str) -> None:
        """Make the names in a local folder durable. Object stores need no such call."""
        if self.is_local:
            sync_folder(path)

    def rename(self, source: str, target: str) -> None:
        """Rename a file and make the new name durable. This is atomic on a local file system; an object store
        makes a copy, which is visible once it is complete, and deletes the source. Raises ``FileNotFoundError`` if
        there is no such source."""
        self.make(posixpath.dirname(target))
        if self.is_local:
            os.replace(source, target)
            self.sync(posixpath.dirname(target))
        else:
            self.files.invalidate_cache()  # another process may have renamed it
            self.files.mv(source, target)


def hive_partitions(rows: pa.Table, fields: Sequence[str]) -> Iterator[tuple[str, pa.Table]]:
    """Split rows by the values of ``fields``. Yields the folder of each partition (``day=2024-01-01``) and its
    rows, in their order and without ``fields``. Without fields it yields all rows with an empty folder name."""
    if not fields:
        yield "", rows
        return
    values = rows.select(fields)
    values = values.cast(pa.schema([(name, pa.string()) for name in fields]))
    values = values.append_column("", pa.array(range(rows.num_rows), pa.int64()))
    groups = values.group_by(list(fields), use_threads=False).aggregate([("", "list")])
    content = rows.drop_columns(list(fields))
    for group in groups.to_batches():
        indices = group.column("_list")
        for index, key in zip(indices, group.select(fields).to_pylist(), strict=True):
            folders = (
                f"{urllib.parse.quote(name, '')}={_NULL if value is None else urllib.parse.quote(value, '')}"
                for name, value in key.items()
            )
            yield "/".join(folders), content.take(index.values)
