"""Training state in checkpoints: what is saved, how ranks write it together, and how another layout reads it.

Start with `collective_write.py`.

- `collective_write.py`: Collective checkpoint writes: rank 0 begins, every rank writes, rank 0 commits; a failure on
  any rank aborts.
- `consolidate.py`: Consolidated weights in the folder format of transformers and vLLM, gathered one tensor at a time.
- `error_feedback_state.py`: Checkpointing of error feedback: the part of the gradients that compression has not sent
  yet.
- `lr_schedule_state.py`: Learning rate schedules of the job: recorded at the start, compared on a resume, advanced to a
  step.
- `optimizer_options.py`: The optimizer options that the job's factory sets.
- `optimizer_state.py`: Optimizer state by parameter name.
- `pipedream_state.py`: Checkpoints of weight stashing: the older weights that a pipeline without flush still needs.
- `resume_checks.py`: Resume checks: compare what must not change between the saved run and the resumed run.
- `shard_ownership.py`: Shard ownership: which part of a tensor a rank writes, and how it reads its shard from another
  layout's shards.
- `state_dict_view.py`: A view of the model's `state_dict`: each name with this rank's tensor, which may be a shard.
- `state_json.py`: State dicts as JSON.
- `state_outside_state_dict.py`: Model state outside the tensors of its `state_dict`: non-persistent buffers, and extra
  state.
- `tensor_bytes.py`: Conversion of tensors to bytes and back, bit for bit.
- `train_state.py`: Training state between two steps: collect it for a checkpoint, and load it from one.
- `unsaved_state_warnings.py`: Warnings about unsaved state: attributes of optimizer, model and loss that change and are
  in no checkpoint.
- `files/`: Checkpoint files on disk, without torch: manifest, two-phase commit, safetensors, resharding reads.
"""
