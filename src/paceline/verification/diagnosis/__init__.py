"""Find the likely cause of a differing gradient or update, by testing hypotheses against the numbers.

Start with `gradient_cause.py`.

- `difference_location.py`: Describe, at the end of a message, on which ranks a difference was found; an empty text
  means all ranks.
- `gradient_cause.py`: Find the likely cause of a wrong gradient: a mistake that gives microbatches wrong weights in the
  sum.
- `gradient_diagnosis.py`: Find the cause of a wrong gradient: compute the reference's step again by microbatch, loss
  term and random seed.
- `gradient_evidence.py`: The evidence about one wrong gradient: its values on the ranks, and each microbatch's
  contribution.
- `hypotheses.py`: List common mistakes in combining the gradients of several ranks, each as a coefficient for every
  microbatch.
- `local_gradients.py`: Find where a wrong gradient arises: every rank runs its own microbatches again, without
  reduction.
- `module_outputs.py`: Compare every module's output between the layout and one process, to find the first module that
  differs.
- `observed_step.py`: A step as the layout ran it, and a check that the layout read the same data as one process.
- `placement_cause.py`: Find placement faults in a wrong gradient: partial sums, unequal copies, moved rows, a stage
  without gradients.
- `rank_names.py`: Names of ranks by their mesh coordinates, for messages, and which shards of a tensor the ranks hold.
- `swapped_gradients.py`: Detect swapped gradients, which arise if ranks iterate over their parameters in different
  orders.
- `update_cause.py`: Find the likely cause if gradients are right but weights or buffers after the update are not.
"""
