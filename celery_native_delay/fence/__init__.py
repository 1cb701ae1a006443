"""Fenced runs: of all attempts at a part of a Spark job, the tasks of one run."""
