"""Read and check what the user asked for: settings, layout, update rule, compression and job reference.

Start with `settings.py`.

- `activation_checkpointing.py`: Parse the activation checkpointing that the user requests; works without torch.
- `axis_counts.py`: Read the counts in a layout.
- `compression.py`: Parse the gradient compression that `--compress` requests: a method and its options.
- `from_json.py`: Convert a plan file's JSON to the types that it was written from.
- `job_reference.py`: Parse a reference to a job (`job.py`, `job.py:name` or `pkg.module:name`) and check it without
  importing the job.
- `layout.py`: Parse a layout: how the model is placed on the ranks, as requested on the command line; works without
  torch.
- `merge_settings.py`: Merge settings from defaults < job < file < command line, with each value's origin; report all
  problems at once.
- `other_tool_options.py`: Map the options of other training tools to their equivalents in Paceline.
- `parse_auto_layout.py`: Recognize the layout `auto`, for which Paceline chooses the layout.
- `resume_allowances.py`: Define the names that `--allow` accepts, and how a resume treats each setting that differs
  from the checkpoint's.
- `secret_settings.py`: Recognize secret settings, which are hidden on screens and stored in files that only the owner
  can read.
- `settings.py`: Define all settings: the dotted name, type, range and default of each.
- `task.py`: Define the task that a command passes, as plain JSON, to the worker processes that it starts.
- `text_file.py`: Read text files that a user gives, with errors that name the problem.
- `update_rule.py`: Parse the update rule, which decides how a batch becomes an update of the weights.
"""
