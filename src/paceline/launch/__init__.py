"""Process launch: starts ranks, or joins ranks that torchrun, mpirun or srun started.

Start with `launcher.py`.

- `folder_watch.py`: A watch over the run folder during a training, because its ranks notice only at their next save
  that it is gone.
- `inherited_environment.py`: Ownership of the environment variables that describe a rank, such as RANK and WORLD_SIZE.
- `joined_rank.py`: The files of a rank that another launcher started: its log, its activity and its failure.
- `launch_environment.py`: The environment of the fork server, and the choice of the kernels of exact mode, before torch
  is imported.
- `launcher.py`: The launcher: runs the attempts of a run one after the other, and returns how the last one ended.
- `launcher_variables.py`: Detection of a world that another launcher started, from the variables of torchrun, Open MPI,
  Slurm or MPICH.
- `memory_disk.py`: Folders of checkpoints in memory: a command chooses its own, and removes those that killed commands
  left.
- `rank_log.py`: The log of a rank that another launcher started: the rank itself writes its output there.
- `rendezvous.py`: Rendezvous on one machine for launchers that offer none: rank 0 listens, and writes its port to a
  file.
- `requeued_run.py`: The run of a scheduler's job: a job that is started again finds the run that it began before.
- `run_outcome.py`: The outcome of a run that this machine launched, and what the screen and `--json` say about it.
- `agent/`: The supervisor that starts, watches and ends the ranks of one machine, and the main function of a rank.
- `failures/`: Failure diagnosis: finds which rank failed first, which rank hangs and where, and whether memory ran out.
- `ray/`: Training under Ray Train: Ray places, resizes and restarts its workers, and each worker starts the agent of a
  node.
- `several_nodes/`: A run over several nodes that Paceline starts itself: one agent on each node, and the head's agent
  decides.
- `torchrun/`: `torchrun --rdzv-backend=paceline`: torchrun's workers are forked from a process that has torch imported.
"""
