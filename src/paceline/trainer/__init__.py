"""Training runs: the loop, the session of one rank, saving, logging, evaluation.

Start with `entrypoints.py`.

- `entrypoints.py`: Entry points that each rank runs for `train` and `evaluate`.
- `fault_injection.py`: Injection of faults before a step, also of those that change its numbers: a wrong loss, or a
  wrong weight.
- `loop.py`: The training loop: run steps, log them, and evaluate, save or stop when due.
- `one_step_per_batch.py`: A guard that gives each batch of a run one step, although the user may write several loops
  one after another.
- `parameter_server_worker.py`: A parameter server's worker: it leases a share of a batch, computes the share's
  gradient, and pushes the gradient.
- `random_access_reading.py`: Read any part of any batch.
- `run.py`: `pl.Run`: a run that a script or a rank of `paceline train` opens.
- `script_restart.py`: The script of a `pl.Run`: its command line, its restart in the ranks, and the task fields that
  the ranks inherit.
- `session.py`: The session of one rank: it is built from a task, contains the training loop, and closes its resources.
- `step_logger.py`: Logs and checks of finished steps.
- `train_mode.py`: Set a model to training mode before the first step, as a loop that calls `model.train()` does.
- `checks/`: Checks of a job and its options before the first step.
- `diagnostics/`: Diagnostics of memory, non-finite numbers, differing replicas and forecasts.
- `evaluation/`: Evaluation, metrics over all ranks, and early stopping.
- `saving/`: Saving and resuming: checkpoints on disk and in memory, and the state that update rules add to them.
- `setup/`: Setup of a training run: settings, data, model, optimizers and step.
"""
