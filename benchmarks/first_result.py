"""Starts a topology of 4 workers and exits after its first result, to measure a cold start."""

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
        # The measured time ends with this process; stopping Spark in order is not part of a start.
        os._exit(0)


if __name__ == "__main__":
    main()
