"""Evaluation, metrics over all ranks, and early stopping.

Start with `evaluator.py`.

- `early_stopping.py`: The decisions that follow from an evaluation: whether it is the best so far, and whether to stop
  early.
- `evaluator.py`: Exact metrics: each sample counts once, without padding, and sums do not depend on which ranks
  computed them.
- `on_eval_results.py`: The results of `on_eval`, made equal on every rank, because decisions depend on them.
- `torchmetrics_adapter.py`: Metric objects (torchmetrics).
"""
