"""The control protocol between the driver, its workers and operators.

``commands`` are messages from the driver to a worker, ``events`` from a worker to the driver, and ``requests``
from operators. ``codec`` encodes and decodes messages and checks their types; ``wire`` has the handshake and the
framing. The packages ``driver`` and ``worker`` import this package; it imports neither.
"""
