"""Make execution plans from a layout and a cluster, and refuse combinations that cannot work.

Start with `execution_plan.py`.

- `bucket_sizes.py`: The sizes, in bytes, of the buckets in which gradients are sent.
- `compression_checks.py`: Refuse layouts, update rules and settings that gradient compression cannot be combined with.
- `exact_checks.py`: Refuse layouts and settings that exact mode cannot be combined with, and numbers of shards that do
  not fit.
- `execution_plan.py`: Make the execution plan: ranks, replicas, microbatches, backend and threads, with a line of
  explanation for each.
- `hogwild_checks.py`: Refuse layouts and settings that Hogwild cannot be combined with.
- `host_resources.py`: Detect this machine's CPUs and GPUs without torch.
- `layout_checks.py`: Refuse settings that a layout does not support.
- `local_sgd_checks.py`: Plan local SGD: when sites synchronize, which parameters they send, and which layouts and
  settings it supports.
- `mesh.py`: Build the mesh of a layout: the ranks on each axis, the coordinates of each rank, and which sizes fit the
  ranks.
- `parameter_server_checks.py`: Plan a parameter server: divide ranks into servers and workers, and refuse unsupported
  layouts and settings.
- `pipedream_checks.py`: Plan pipelines without flushes (PipeDream): which layouts and settings they support, and their
  weight versions.
- `pipeline_options.py`: Plan a pipeline: build its program, check its schedule, and describe its stages and its bubble.
- `rank_placement.py`: The check that the groups of ranks that talk most are not spread over more nodes than they need.
- `rule_planning.py`: Define the planning rules of an update rule, for the planner and the commands.
- `update_rule_checks.py`: Look up the planning rules of an update rule, and check settings with them.
"""
