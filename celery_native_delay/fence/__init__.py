"""Fenced Spark runs: if Spark repeats a partition, workers run the tasks of one attempt only."""
