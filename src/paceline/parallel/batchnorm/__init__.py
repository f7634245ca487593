"""BatchNorm over several microbatches and ranks: the running statistics are those of one process."""
