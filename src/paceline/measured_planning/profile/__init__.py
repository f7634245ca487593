"""Profile a job's model: trace a few batches to learn its compute and memory."""
