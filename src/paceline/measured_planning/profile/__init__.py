"""Profile a job's model: what it computes and holds, from a few traced batches."""
