"""Activation checkpointing: the activations of blocks are freed in forward and recomputed in backward.

Start with `checkpointing.py`.

- `buffer_guard.py`: Protect a block's buffers while its forward is recomputed.
- `checkpointing.py`: Activation checkpointing of a model's blocks: activations are freed in forward and recomputed in
  backward.
- `kv_cache.py`: Copy or leave out the key-value caches that a model passes to its blocks, which training does not need.
- `saved_ops.py`: Selective checkpointing (`remat=selective`): the results of expensive operations are saved, not
  recomputed.
"""
