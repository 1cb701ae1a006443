"""If Spark repeats a partition, workers run the tasks of only one attempt."""
