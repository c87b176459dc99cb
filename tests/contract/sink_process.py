"""A process with one sink task and a small coordinator, which ``test_sinks`` kills.

It writes rows 0, 1, 2 … without end, commits in epochs, reports every step on standard output, and starts from the
newest manifest.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa

from penstock.topology.components import Context, Source

ROWS = 7  # rows per epoch


def main(job: dict[str, Any]) -> None:
    manifest = Path(job["manifest"])
    state = json.loads(manifest.read_text()) if manifest.exists() else {"epoch": 0, "position": 0, "tokens": []}
    module, kind, arguments, options = job["recipe"]
    sink = getattr(importlib.import_module(module), kind)(*arguments, **options)
    context = Context(
        job["topology"], "sink", 1, 0, {"sink": (1,)}, delivery="exactly_once", folder=job["folder"], generation=1
    )
    sink.prepare({}, context)
    sink.recover(state["tokens"])
    print("recovered", flush=True)
    epoch, position = state["epoch"], state["position"]
    while True:
        epoch += 1
        rows = range(position, position + ROWS)
        words = [f"w{n % 3}" for n in rows]
        sink.write(
            pa.record_batch([pa.array(words), pa.array(rows)], ["word", "count"]), Source("s", "default", 2)
        )
        position += ROWS
        print("written", flush=True)
        token = sink.prepare_commit(epoch)
        print("prepared", flush=True)
        state = {"epoch": epoch, "position": position, "tokens": [token]}
        manifest.with_suffix(".new").write_text(json.dumps(state))
        os.replace(manifest.with_suffix(".new"), manifest)
        print("in the manifest", flush=True)
        sink.commit(token)
        print("committed", flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
