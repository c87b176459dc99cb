"""Python's workers import nothing from the folder that Spark happens to be started in."""

SAFE_PATH = "PYTHONSAFEPATH"
"""The environment variable by which ``python -m`` leaves the folder it was started in out of its path: anyone may
have put modules there. The user's own modules travel with the topology."""
