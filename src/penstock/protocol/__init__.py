"""What driver and workers say to each other: messages, their wire format and the handshake."""
