"""Runs topologies on Spark. This is the only package that imports pyspark."""
