"""The loss contract: the values a user's loss returns, and how they are checked and summed.

Start with `loss_return_value.py`.

- `batch_loss.py`: A loss over the whole global batch, such as a contrastive loss: every replica computes it from all
  outputs.
- `batch_mismatch.py`: The error for a batch that does not fit the model's forward.
- `frozen_parameters.py`: A check that parameters which were frozen when the run was built stay frozen, because no
  optimizer has them.
- `loss_return_value.py`: The loss contract: a loss returns sums and counts, and Paceline divides once, by the *global*
  counts.
- `mean_or_sum_probe.py`: A probe that detects a loss that is not a sum over samples.
- `model_loss.py`: The loss that a model computes itself, as Hugging Face models do: a sum if the model supports it,
  else a mean.
- `modules_captured_by_loss.py`: A search for the modules that a loss function captures.
"""
