"""BatchNorm over several microbatches and ranks, with the running statistics of one process."""
