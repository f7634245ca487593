"""The PipeDream step: a pipeline that is never flushed, with weight stashing.

Start with `pipedream_step.py`.

- `in_flight_batches.py`: The batches and microbatches in flight in a pipeline without flush, and gradient sums over a
  stage's replicas.
- `pipedream_rule.py`: The rules of PipeDream and 2BW: a pipeline that is never flushed, with weight stashing.
- `pipedream_step.py`: The step of a pipeline that is never flushed: each stage updates its weights while later batches
  are in flight.
- `weight_versions.py`: The versions of a stage's weights, one per update, that microbatches in flight still need.
"""
