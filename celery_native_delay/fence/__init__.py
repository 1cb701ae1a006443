"""Fenced Spark runs: of repeated attempts at a partition, the tasks of one attempt run."""
