"""`torchrun --rdzv-backend=paceline`: torchrun's workers are forked from a process that has torch imported.

Start with `torchrun_backend.py`.

- `local_rendezvous.py`: The rendezvous of `torchrun --rdzv-backend=paceline` on one machine: a new store for each
  attempt, and fast workers.
- `script_server.py`: The script server: a process with torch imported that forks the workers of torchrun.
- `torchrun_backend.py`: The entry point `torchrun.handlers`: every torchrun of this installation imports it, and learns
  of the backend.
- `startup/`: A folder that torchrun's workers have on their module path: Python runs its `sitecustomize` at the start.
"""
