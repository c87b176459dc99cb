"""The environment variable that keeps Python workers from importing modules from Spark's current folder."""

SAFE_PATH = "PYTHONSAFEPATH"
"""If this variable is set, ``python -m`` does not put the current folder on its path. Other users may have put
modules there; the user's own modules are shipped with the topology."""
