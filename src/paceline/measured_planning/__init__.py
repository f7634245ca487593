"""Plan by measurement on this machine: profile the user's job, replay layouts, and time the finalists.

Start with `plan_worker.py`.

- `auto_layout.py`: Automatic layouts (`--layout auto`): choose a layout and fallbacks for this machine before a run's
  workers start.
- `auto_worker.py`: The planning process of `--layout auto`: choose a layout and its fallbacks before the workers start.
- `choose_layout.py`: Choose the recommended layout: the fastest one that fits in a replay.
- `depth_extrapolation.py`: Depth extrapolation: compute a deep model's memory exactly from replays with few blocks per
  stage, to save time.
- `finalist_replay.py`: Check a plan's finalists: replay a step of the run on fake tensors, and run the checks that need
  real values.
- `memory_replay.py`: Memory replay: run a step of a layout on fake tensors and simulated ranks, and measure the memory
  of each stage.
- `oom_advice.py`: Advice after out-of-memory: layouts that need less memory, with their additional time and the command
  to type.
- `plan_cache.py`: A cache of plans by job.
- `plan_local.py`: Plan for the machines on which these ranks run, with a machine benchmark and timed steps.
- `plan_worker.py`: The planning process of `paceline plan`: profile the job, search layouts, and replay the finalists.
- `script_launcher.py`: Launch the ranks of a script that opened a `pl.Run`, and restart them with a fallback layout
  after out-of-memory.
- `simulated_ranks.py`: Simulated ranks: one process simulates all ranks of a run, so that a step of thousands of ranks
  can be inspected.
- `split_trial.py`: Check with real values, before a run, that a model split by `cp` or `ep` computes the results of the
  whole model.
- `profile/`: Profile a job's model: trace a few batches to learn its compute and memory.
- `timing/`: Time layouts and schedules on this machine, and cache the results.
"""
