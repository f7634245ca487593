"""Data-parallel replicas: bucketed gradient all-reduce, exact sums, module buffers, replicas as threads."""
