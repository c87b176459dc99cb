"""The user API for describing a topology: components, streams, groupings and the builder. Everything here is inert
data; nothing runs."""
