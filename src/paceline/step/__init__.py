"""The training step: forward, backward, reduction, optimizer update.

Start with `synchronous.py`.

- `forward_backward.py`: Forward and backward passes over one rank's microbatches, one after another.
- `generate.py`: Text generation: extend sequences of token ids by repeated forwards, with the same result on every
  rank.
- `microbatches.py`: The input of a step: this replica's microbatches of one global batch.
- `optimizer_update.py`: The optimizer update: unscale gradients, measure the norm, clip, step, advance LR schedulers,
  update the EMA.
- `replica_context.py`: The components that one replica needs to run a step.
- `spike_detector.py`: Detection of spikes: steps whose loss or gradient norm is far above the last values.
- `step_rule.py`: The interface of an update rule, for the loop, the set-up, checkpoints and verify.
- `step_totals.py`: The totals of a step over all ranks: one small vector, whose all-reduce overlaps the backward.
- `synchronous.py`: The synchronous training step: replicas run their microbatches, all-reduce gradients and apply the
  same update.
- `update_rules.py`: The table of update rules.
- `local_sgd/`: Local SGD and DiLoCo: sites that train independently and synchronise every few steps.
- `loss/`: The loss contract: the values a user's loss returns, and how they are checked and summed.
- `parameter_server/`: A parameter server: workers push gradients, servers hold weights.
- `pipedream/`: The PipeDream step: a pipeline that is never flushed, with weight stashing.
- `pipeline/`: The execution of pipeline schedules on each rank: an interpreter of actions, messages, and split
  backward.
- `shared_memory/`: Replicas as threads of one process, and Hogwild on shared weights.
"""
