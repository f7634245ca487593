"""Access to a user's module: blocks, parameters, buckets, hooks, and the location of its tensors.

Start with `parameters.py`.

- `attribute_fingerprints.py`: Compute fingerprints of module attributes that hold state: lists, objects, generators,
  unregistered tensors.
- `blocks.py`: Search for a model's chain of repeated blocks, the units of pipeline stages, remat, compilation and
  sharding.
- `broadcast_initial.py`: Broadcast rank 0's initial weights and buffers, after a check that all ranks have built the
  same model.
- `forward_counters.py`: Keep counters that a forward changes, such as `self.calls += 1`, equal on all ranks and to
  those of one process.
- `installed_hooks.py`: Find and remove hooks that a forward installs once, in its first call.
- `model_copy.py`: Deep-copy a user's model, also if its modules store tensors of a forward.
- `number_values.py`: The value of a number attribute: which values count, and how values are compared and encoded for
  messages.
- `parameters.py`: List the trainable parameters, and group them into buckets, whose gradients are sent together.
- `shard_spec.py`: A shard spec maps a rank's local tensor into the full tensor, box by box.
- `sharded_tensors.py`: Describe tensors that are sharded over several ranks, and gather full tensors with the same
  bits.
- `tensor_access.py`: Copy, compare and checksum tensors, including expanded tensors and DTensors.
- `user_call_isolation.py`: Call user code without side effects, for planning: afterwards the model is unchanged.
- `user_hooks.py`: Check user hooks on parameters: a layout that replaces a parameter by another tensor can't call its
  hooks.
"""
