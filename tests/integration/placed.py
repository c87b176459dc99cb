"""Components of the tests of placement."""

from pathlib import Path

from tests.fault.components import Pass


class Picky(Pass):
    """Does not open on the node that is named in a file of this name."""

    def __init__(self, refuses):
        self.refuses = Path(refuses)

    def prepare(self, conf, context):
        if self.refuses.exists() and self.refuses.read_text() == context.node:
            raise RuntimeError("not here")
