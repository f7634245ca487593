"""Profile a job's model: its compute and its memory, from a few traced batches."""
