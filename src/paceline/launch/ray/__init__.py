"""Training under Ray Train: Ray places, resizes and restarts its workers, and each worker starts the agent of a node.

Start with `ray_run.py`.

- `node_process.py`: The command of one node, as a process that a Ray worker has started.
- `ray_run.py`: A training under Ray Train, as the file that `paceline submit --to ray` writes describes and starts it.
- `ray_trainer.py`: The part of a training that Ray Train runs: the trainer in the driver, and the function of each of
  its workers.
"""
