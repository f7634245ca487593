"""Context parallelism: a sequence sharded over the ranks of a `cp` axis, with the model's forward unchanged.

Start with `context_parallel.py`.

- `attention_mask.py`: Interpretation of an attention mask that a model built from its shard of the sequence.
- `compare_split_results.py`: Comparison of results on the shards of a sequence with those on the full sequence, up to
  rounding in float64.
- `context_parallel.py`: Context parallelism: a sequence sharded over the ranks of a `cp` axis, with the model's forward
  unchanged.
- `context_parallel_check.py`: A check, in one process and before the run starts, that a model gives the same results on
  a sharded sequence.
- `exact_context.py`: Exact context parallelism: the same bits for any number of `cp` ranks that divides the number of
  sequence shards.
- `function_mode.py`: A function mode that runs a model's own forward on a shard of a sequence.
- `multihead_attention.py`: The forward of `nn.MultiheadAttention` on a shard of a sequence, with ring attention.
- `random_ops.py`: Detection of random draws that have a different size on a shard than on the full sequence.
- `ring_attention.py`: Ring attention over a sequence that is sharded over the ranks.
- `sequence_sharding.py`: Sharding of a sequence over the ranks of a `cp` axis, and of a batch along it.
- `shard_threads.py`: Threads of one process that take turns: one thread for each sequence shard of this rank.
- `shard_world.py`: The world of the sequence shards: what ring attention sees as ranks, on any number of processes.
"""
