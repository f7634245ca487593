"""Data parallelism: bucketed gradient all-reduce, exact gradient sums, module buffers, and replicas in threads."""
