"""Parallelize a model: by data, sharding, tensors, context, experts and pipeline stages, and with checkpointing.

Start with `parallelize.py`.

- `compile.py`: Compile a model block by block.
- `parallelize.py`: Transform a full model into this rank's part of it: apply the entries of `PARALLELISMS`, in that
  order.
- `placement.py`: Hold the state of a model while parallelisms are applied to it, and define the interface of a
  parallelism.
- `trace_example_forward.py`: Run one microbatch before placement, to measure block times and to choose a tensor plan.
- `activation_checkpointing/`: Activation checkpointing: the activations of blocks are freed in forward and recomputed
  in backward.
- `batchnorm/`: BatchNorm over several microbatches and ranks, with the running statistics of one process.
- `compression/`: Gradient compression for data-parallel replicas.
- `context_parallel/`: Context parallelism: a sequence sharded over the ranks of a `cp` axis, with the model's forward
  unchanged.
- `data_parallel/`: Data parallelism: bucketed gradient all-reduce, exact gradient sums, module buffers, and replicas in
  threads.
- `expert_parallel/`: Expert parallelism: the experts of a mixture-of-experts block sharded over the ranks of an `ep`
  axis.
- `gradients/`: Gradient norms, tied parameters, and combined reducers.
- `initialization/`: Initialize a model: each rank gets only its shards.
- `module_access/`: Access to a user's module: blocks, parameters, buckets, hooks, and the location of its tensors.
- `pipeline/`: Pipeline stages of any model: the split into stages, the values sent between stages, and the run of a
  stage.
- `sharding/`: Sharding of parameters, gradients and optimizer state: ZeRO stages 1 to 3, stage 3 on `fully_shard`.
- `tensor_parallel/`: Tensor parallelism of any model: parameters are sharded, activations carry their sharding,
  collectives follow.
"""
