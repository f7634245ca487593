"""The data order: maps seed, epoch and position to the samples of each microbatch as a pure function. No torch.

Start with `batches.py`.

- `batches.py`: Global batches of an epoch and their microbatches: the same for any number of ranks.
- `cursor.py`: The data cursor: a run's position in its data, the same on all ranks.
- `leases.py`: Leases of a parameter server: which worker computes which share of a batch, and on which weight version.
- `microbatch_assignment.py`: Assignment of microbatches to replicas.
- `permutation.py`: A shuffle that can be evaluated at any single position: a pure function of (seed, epoch, index).
- `virtual_shards.py`: Assignment of a stream's samples to batches by virtual shard: a function of batch size and shard
  lengths only.
"""
