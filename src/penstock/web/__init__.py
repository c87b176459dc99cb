"""Serves the status of a running topology over HTTP on loopback: JSON for programs, text for Prometheus."""
