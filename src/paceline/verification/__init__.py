"""`paceline verify`: check that a layout computes the same training as one process.

Start with `verify_worker.py`.

- `compare_evaluation.py`: Compare the layout's evaluation with a one-process evaluation of the same weights.
- `compare_in_lockstep.py`: The lockstep rung: compare the layout with one process step by step, each time from equal
  weights.
- `compare_independent_runs.py`: The free-running rung: train the layout and one process independently, then compare
  their weights and evaluations.
- `compare_step.py`: Compare a step of all ranks with the reference, on rank 0: data, loss, gradients, buffers and
  update.
- `gather_copies.py`: Gather tensors from all ranks as full tensors, one set for each copy of the model in the layout.
- `noise_floor.py`: Noise floors: how far two correct results may differ, measured for each tensor.
- `precision.py`: Build a job, and this rank's training setup for it, in the precision of a comparison.
- `precision_cast.py`: Cast a model to another precision, keeping complex numbers complex and shared memory shared.
- `rung_result.py`: The result of a rung: a verdict, the worst distance, and the first difference with its likely cause.
- `tensor_distance.py`: Norms and distances of tensors of any type, computed in double precision.
- `verify_answer.py`: The answer of `verify` as JSON, and as a table for the console.
- `verify_single_process.py`: The first rung: one process compared with itself.
- `verify_worker.py`: Worker process of `paceline verify`: it runs the rungs and combines their results into one
  verdict.
- `diagnosis/`: Find the likely cause of a differing gradient or update, by testing hypotheses against the numbers.
- `fingerprints/`: `pl.record`: fingerprints of any training run, and their comparison.
- `reference/`: Reference implementations to compare with: one process, or a serial version of an asynchronous update
  rule.
"""
