"""Tensor parallelism of any model: parameters are sharded, activations carry their sharding, collectives follow.

Shoeybi et al., "Megatron-LM", 2019; Korthikanti et al., "Reducing Activation Recomputation", 2022.

Start with `tensor_parallel.py`.

- `auto_plan.py`: Derive a tensor plan by running the model, and check a plan by comparing its results with those of one
  process.
- `auto_plan_search.py`: Search for the weights that can be sharded, by running the model as rank 0 of a group that has
  no other ranks.
- `collectives.py`: Collectives of a tensor-parallel group, plain and as autograd functions.
- `hf_plan.py`: Read the tensor plan of a Hugging Face model from its `_tp_plan` and `base_model_tp_plan`.
- `local_modules.py`: Run modules with the role `local` (experts) on the shards of their parameters, and sum the outputs
  over the ranks.
- `once_differentiable.py`: A decorator for backward functions that cannot be differentiated, with an error that names
  the user's line.
- `plan_dry_run.py`: Dry runs, which search or check a plan; in them, each sharded tensor also stores the full tensor of
  one process.
- `plan_toml.py`: Read and write a tensor plan as a small TOML file that users can edit.
- `sharded_tensor.py`: A tensor subclass that holds one rank's shard, reports the full shape and propagates its
  sharding.
- `sharding.py`: Sharding of one tensor dimension over the ranks, and its propagation through reshapes and slices.
- `tensor_parallel.py`: Shard a model over tensor-parallel ranks; its modules and parameter names do not change.
- `tensor_plan.py`: The tensor-parallel plan maps patterns of names to roles, which say how parameters are sharded.
- `user_hook_local_shards.py`: Give plain local shards to module hooks that do not support sharded tensors.
- `logical/`: Logical shards: the fixed split of weights with which exact mode gives the same bits for any tp.
- `rules/`: Sharding propagation rules of the torch functions.
"""
