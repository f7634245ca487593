"""What a job's model computes and holds, from a few traced batches."""
