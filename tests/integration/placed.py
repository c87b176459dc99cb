"""Components of the placement tests."""

from pathlib import Path

from tests.fault.components import Pass


class Picky(Pass):
    """One task of it does not open on one node; a file of this name says which and where."""

    def __init__(self, refuses):
        self.refuses = Path(refuses)

    def prepare(self, conf, context):
        if self.refuses.exists() and self.refuses.read_text() == f"{context.index} {context.node}":
            raise RuntimeError("not here")
