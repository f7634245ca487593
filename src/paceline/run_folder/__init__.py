"""The folder of a run, and the plan file in it.

Start with `run_folder.py`.

- `plan_file.py`: The plan file, plan.json: the execution plan of a run, and the advice of `paceline plan`.
- `run_folder.py`: The run folder: its files, and how a command finds the run or the checkpoint that the user names.
- `signs_of_life.py`: Signs of life of a run whose processes can't be seen from here: the times of the files in its
  folder.
"""
