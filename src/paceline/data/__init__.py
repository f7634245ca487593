"""Loading data: each replica reads its own microbatches of every global batch."""
