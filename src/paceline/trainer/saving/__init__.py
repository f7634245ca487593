"""Saving and resuming: checkpoints on disk and in memory, and the state that update rules add to them.

Start with `checkpointer.py`.

- `background_saves.py`: Saves in the background: the training waits for a checkpoint in memory, and a thread of rank 0
  copies it to disk.
- `background_thread.py`: A thread for the part of a save that the training does not wait for.
- `checkpointer.py`: Save a run: the contents of a checkpoint, the state that update rules add, and the list of kept
  checkpoints.
- `final_weights.py`: The final weights of a run: `consolidated/`, and a record with their digest.
- `grace_period.py`: The grace period: the time that a scheduler leaves a run between its stop signal and the kill.
- `local_sgd_state.py`: The state of local SGD in a checkpoint: the sites' mean as the model, and each site's own
  weights and optimizers.
- `remote_start.py`: The start of a run with a remote store: the checks of the store, and what a machine with an empty
  disk downloads.
- `remote_tier.py`: The remote tier: a thread of rank 0 that copies checkpoints from the disk to a remote store while
  the run trains.
- `resume_run.py`: Resume a run: the choice of a checkpoint, the checks of what has changed, and the loading of its
  state.
- `rollback.py`: Rollback: after a bad step, the run continues from a state before it, without the samples of this step.
- `run_identity.py`: The identity of a run: the properties that it must still have when it is resumed.
- `space_checks.py`: Checks, at the start of a run, that its checkpoints will fit on the disk and into memory.
- `memory/`: Checkpoints in memory: what a restart after a fault continues from.
"""
