"""`pl.record`: fingerprints of any training run, and their comparison.

Start with `record.py`.

- `compare_recordings.py`: Find where two recordings diverge: the first step, the worst parameter, and the kind of
  difference.
- `fingerprint.py`: Fingerprints: a summary of a tensor from which two runs can be compared without storing the tensor.
- `ill_conditioned.py`: Find parameters whose gradient is only rounding, so that two recordings cannot be judged by
  them.
- `record.py`: `pl.record`: write fingerprints of each step of any training loop, with two added lines.
- `record_layout.py`: One rank of a recorded layout: train a few steps, and write fingerprints of the whole gradients
  and weights.
"""
