"""Starts a topology of 4 workers from nothing and ends with its first result: what a cold start costs."""

from __future__ import annotations

import os
import tempfile

from benchmarks.hops import paced
from penstock import submit


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        handle = submit(paced(100, 3, f"{folder}/latency.npy"))
        handle.internals.server.wait(lambda: "sink" in handle.internals.bus.published(), 60)
        print('{"first": true}', flush=True)
        # The clock stops with this process; an orderly stop of Spark is not part of a start.
        os._exit(0)


if __name__ == "__main__":
    main()
