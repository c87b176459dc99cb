"""Pickles what is sent to the nodes, with PySpark's own cloudpickle, which every node has.

Classes of importable modules are pickled by reference, because their module is shipped. Definitions in
``__main__``, a notebook or a function are pickled by value.
"""

from pyspark.cloudpickle import dumps

__all__ = ["dumps"]
