"""Iterable datasets, split into virtual shards so that any number of ranks reads the same samples."""
