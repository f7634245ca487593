"""Reference implementations to compare with: one process, or a serial version of an asynchronous update rule.

Start with `select_reference.py`.

- `compressed.py`: A one-process reference that compresses as several replicas do, for `--compress`.
- `dropout_isolation.py`: Find a model's dropout rates, and disable dropout within a context.
- `float64_mode.py`: A mode that keeps float64 computations in float64, because many models compute norms, softmax and
  loss in float32.
- `forward.py`: Forward and loss of a job, written for the reference from their definition, without the trainer's code.
- `local_sgd.py`: A one-process reference for local SGD: sites that train separately and synchronise at intervals, run
  in turn.
- `loss_terms.py`: Combine loss terms into one loss for backward, and sum the counts of their targets.
- `parameter_server.py`: A replay of a parameter server's run in one process: the same shares, weight versions and order
  of updates.
- `pipedream.py`: A one-process reference for pipelines without flush, which run each microbatch on weights of several
  versions.
- `process_group_isolation.py`: Isolate the reference from the process group, so that user code does not see the
  surrounding ranks.
- `reference.py`: The reference: a naive one-process run with which every layout is compared.
- `reference_step.py`: One step of the reference: its start, gradient and noise floors.
- `sample_reader.py`: A naive reader of a batch's samples, without loader, workers or cursor.
- `select_reference.py`: The one-process reference of each update rule and of compression, and how `verify` compares a
  run with it.
- `step_coverage.py`: A record of what the compared steps exercised, and statements about what they did not.
- `weight_average.py`: The moving average of a job's weights (`ema=`) for the reference, computed one tensor at a time.
- `whole_batch.py`: Merge several microbatches in one process: for a loss over the global batch, and for layers that see
  all replicas.
"""
