"""Initialize a model: each rank gets only its shards.

The values come from one plain build of the model, or from one random stream per tensor name.

Start with `deferred_init.py`.

- `deferred_fill.py`: Fill a model that was sharded on the meta device with this rank's shards, so that no rank holds
  all of it.
- `deferred_init.py`: Deferred initialization: every rank has the model on the meta device, and gets only the values of
  its shards.
- `init_tape.py`: Record a constructor's tensor operations on the meta device, and replay them for single tensors.
- `meta_forward.py`: Run the forward of a model whose parameters are on the meta device, with shapes only or with
  temporary values.
- `meta_model.py`: Build a model on the meta device, compare two builds, and replace a model's tensors.
- `node_broadcast.py`: Send initial values from the rank that built the model to the other ranks of its node.
- `pretrained.py`: Load a model whose weights are in files: each rank reads only its shards.
- `record_mode.py`: Record a model's constructor: its tensors are meta tensors, and each operation is added to a tape.
- `safetensors_loading.py`: Load shards from safetensors files: each rank reads only the boxes of its shard specs.
- `unsupported_tensors.py`: Refuse tensors that no layout supports: overlapping parameters, sparse or nested tensors,
  NaN initial values.
"""
