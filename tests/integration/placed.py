"""Components of the tests of placement."""

import os

from tests.fault.components import Pass


class Picky(Pass):
    """Does not open as long as there is a file of this name."""

    def __init__(self, refuses):
        self.refuses = str(refuses)

    def prepare(self, conf, context):
        if os.path.exists(self.refuses):
            raise RuntimeError("not here")
