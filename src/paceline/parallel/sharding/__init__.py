"""Sharding of parameters, gradients and optimizer state: ZeRO stages 1 to 3, stage 3 on `fully_shard`.

Start with `sharded_model.py`.

- `execution_order_check.py`: Check that all ranks gather the same FSDP units in the same order.
- `flat_buffer.py`: Pack the rows of several parameters into a flat buffer, for one reduce-scatter or all-gather.
- `fsdp_options.py`: Read the options of full sharding from the layout and the settings.
- `fully_sharded.py`: ZeRO-3 on `fully_shard`: between uses, each rank holds only its rows of every parameter.
- `optimizer_offload.py`: Keep optimizer state in host memory, and move it to the parameters' device only for the step.
- `reduce_scatter_gradients.py`: Reduce-scatter gradients: each rank keeps only its rows of the sums (ZeRO-2 and -3;
  Rajbhandari et al., 2020).
- `row_shards.py`: Row shards: the rows of each parameter that this rank's optimizer updates, as plain local tensors.
- `shardability_check.py`: Check by experiment that an optimizer's update rule is correct on a shard of its parameters.
- `sharded_model.py`: A model sharded by ZeRO: the row shards that this rank's optimizer updates, their reducer and
  their shard specs.
- `unit_gradient_order.py`: Keep the order in which gradients are summed in FSDP units, as exact mode requires.
- `unit_guard.py`: Guards detect calls in which an FSDP unit would behave differently from the same module in one
  process.
- `units.py`: Choose the FSDP units: the modules whose parameters are gathered together.
- `zero1_zero2_reducers.py`: ZeRO-1 and ZeRO-2: each rank's optimizer updates its rows, which are then all-gathered into
  the full parameters.
- `zero_sharded_optimizer.py`: Build the job's optimizer on row shards, with the parameter groups of the full model.
"""
