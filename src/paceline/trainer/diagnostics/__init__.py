"""Diagnostics of memory, non-finite numbers, differing replicas and forecasts.

Start with `nonfinite_inputs.py`.

- `differing_copies.py`: Copies of a weight that differ between ranks, and the search for the wrong one.
- `finite_weights.py`: Refuse to save weights that are not finite: the checkpoint would be useless, and would replace a
  good older one.
- `forecast_check.py`: Compare a run's first steps with its forecast: the highest peak memory of a rank, and the seconds
  per step.
- `forecast_lookup.py`: Look up a run's forecast: from the plan that chose its layout, or from the last stored plan of
  its job.
- `memory_report.py`: A report of a rank's memory by purpose, for the error that says that the rank has run out of
  memory.
- `nonfinite_inputs.py`: The search for NaN and infinity in the inputs of a step whose loss or gradient is not finite.
- `parameter_statistics.py`: Optional statistics of each parameter: the norms of its weight and gradient, by FQN.
- `replica_check.py`: A cheap check that the replicas are equal, made every `train.check_every` steps.
"""
