"""Check training scripts that do not use Paceline: record a run of an unmodified script, and judge it.

Start with `check_command.py`.

- `check_command.py`: The `check` verb: runs an unmodified training script for a few steps, and says whether it trains
  as it should.
- `loop_check.py`: `pl.check`: judge the training loop of this process, in a notebook or in a script, without a line in
  a shell.
- `record_command.py`: The `record` verb: runs an unmodified training script for a few steps, and keeps fingerprints of
  them to compare.
- `recorded_script.py`: Record the run of a command, and say why the recording is not whole, if it isn't.
- `recording.py`: A recording of a training script: a file for each rank, with a line for each step of an optimizer.
- `script_process.py`: Run a foreign training command with the recorder in it, until its ranks have made enough steps or
  it ends.
- `verify_script_command.py`: The `verify-script` verb: checks that a script trains on several ranks as in one process,
  fed with the same batches.
- `comparison/`: The comparison of two recorded scripts: the same training, a different one and why, or no answer and
  why.
- `judge/`: The judge of a recorded run of a script: what is wrong, what is sound, and what was not exercised.
- `recorder/`: The recorder inside the processes of a foreign script: fingerprints of each optimizer step, by hooks of
  torch.
"""
