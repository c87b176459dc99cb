"""Pickling for the way to the nodes: PySpark's own cloudpickle, which every node has.

Classes of importable modules travel by reference (their module is shipped); what lives in ``__main__``, a
notebook or a function travels by value.
"""

from pyspark.cloudpickle import dumps

__all__ = ["dumps"]
