"""Where Penstock meets Spark. The only package that imports pyspark."""
