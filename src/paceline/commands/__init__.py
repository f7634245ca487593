"""One file for each command of `paceline`, and the same commands as Python functions.

Start with `command_table.py`.

- `ckpt.py`: The `ckpt` verb (ls, verify, diff, consolidate, prune): works on checkpoints without torch, one tensor at a
  time.
- `command_table.py`: The table of verbs: the options of each, and the function that runs it, which is imported when the
  verb runs.
- `compare.py`: The `compare` verb: compares runs, recordings of `pl.record`, or layouts of one job.
- `config.py`: The `config` verb: prints every setting of a job, its value, and where the value comes from.
- `doctor.py`: The `doctor` verb: checks this machine, or all nodes of a run and the links between them, before a
  training.
- `evaluate.py`: The `evaluate` verb: computes the exact metrics of a checkpoint.
- `new.py`: The `new` verb: writes an example job.
- `plan.py`: The `plan` verb: finds the layouts of a job that fit a cluster, and predicts their memory and time.
- `python_functions.py`: The verbs as functions: `pl.train`, `pl.verify`, `pl.plan` and the others.
- `report.py`: The `report` verb: writes the HTML page of a run.
- `simulate.py`: The `simulate` verb: simulates a step of a layout in virtual time, and forecasts the goodput under
  failures.
- `submit.py`: The `submit` verb: writes and checks the file that hands a training in to Slurm, Kubernetes, Ray or
  SageMaker.
- `train.py`: The `train` verb: trains a job, or resumes a run.
- `verify.py`: The `verify` verb: checks that a layout or an update rule trains as its reference in one process does.
- `why.py`: The `why` verb: explains why a run failed, was stopped or hangs, from its folder and its ranks' activity
  files.
- `common/`: Code that several commands share: option checks, devices, starting the ranks, and the command that resumes
  a run.
"""
