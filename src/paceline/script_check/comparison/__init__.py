"""The comparison of two recorded scripts: the same training, a different one and why, or no answer and why.

Start with `script_comparison.py`.

- `compare_verb.py`: The `compare` verb: recordings of scripts are compared here, and all else by
  `paceline.commands.compare`.
- `continuation.py`: A run that continues another one from a checkpoint: its steps are compared with those after the
  checkpoint.
- `difference_cause.py`: The likely cause of a difference between the gradients of two runs that had the same samples.
- `piece_comparison.py`: The comparison of one process with ranks that hold its model in pieces, element by element of
  each piece.
- `rounding_drift.py`: Runs that drift apart after several equal steps, as rounding makes them do where a ReLU switches.
- `sample_comparison.py`: The comparison of the samples and settings of two runs, step by step.
- `script_comparison.py`: Compare two recordings of scripts: the same training, or the first difference and its likely
  cause.
- `script_records.py`: Two recordings of scripts in the form in which recordings of `pl.record` are compared: whole
  tensors, equal names.
"""
