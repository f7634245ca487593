"""Profile a job's model: trace a few batches to learn its compute and memory.

Start with `profile_job.py`.

- `batch_scaling_fit.py`: Fit how a measured cost depends on the number of samples and on their length: fixed, linear
  and quadratic terms.
- `largest_sample.py`: Profile a job with its largest sample as every sample, so that a plan holds for samples of
  different sizes.
- `prepare_profiling.py`: Prepare a job for profiling, and the space of layouts that a plan searches.
- `profile_job.py`: Profile a job's model for the planner: trace it on fake tensors.
- `recompute_profile.py`: Profile the activation memory of each part of a model, by policy of activation checkpointing
  and tp size.
- `sample_batches.py`: Read sample batches for profiling a model, with different numbers and lengths of samples.
- `truncated_model.py`: Truncate models for profiling: build a model once, and keep few of its equal blocks.
"""
