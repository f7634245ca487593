"""The execution of pipeline schedules on each rank: an interpreter of actions, messages, and split backward.

Start with `pipeline_forward_backward.py`.

- `p2p.py`: Point-to-point messages between stages: tensors in one buffer, without pickle.
- `pipeline_forward_backward.py`: Forward and backward of microbatches through pipeline stages, in the order of a
  schedule.
- `schedule_interpreter.py`: The interpreter of pipeline programs: one for all schedules, for training and for
  forward-only passes.
- `shard_stages.py`: Pipeline stages under exact context parallelism: each sequence shard of this rank runs through a
  stage by itself.
- `split_backward.py`: Backward in two halves for zero-bubble schedules: the input gradients first, the weight gradients
  later.
- `stage_worker.py`: The work of a rank at its pipeline stages: the user's forward and loss, and the gradient sums of
  tied weights.
"""
