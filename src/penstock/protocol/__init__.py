"""What the driver and the workers say to each other, and how it is written on a socket.

``commands`` has what the driver says to a worker, ``events`` what a worker says to the driver, ``requests`` what
people ask of a running topology. ``codec`` turns messages into bytes and back and checks their types, ``wire`` has
the handshake and the framing. Both sides import this package; it imports neither.
"""
