"""`pl.record`: fingerprints of any training run, and their comparison."""
