"""Fenced Spark jobs: of all attempts at a partition, the tasks of one attempt run."""
