"""Code that several commands share: option checks, devices, starting the ranks, and the command that resumes a run.

Start with `execution.py`.

- `devices.py`: Checks of the requested ranks and devices against this machine and the launcher's world.
- `dry_run.py`: The checks that `--dry-run` adds to those of `make_task`: the run folder, the run to resume, and the
  sinks.
- `execution.py`: The steps of verbs that start processes: build the task, choose the run folder, run the ranks, return
  the result.
- `help_page.py`: The page that `paceline VERB --help` prints: usage, an example, options in four groups, and common
  settings.
- `hf_config_as_job.py`: A Hugging Face config used as a job, for the verbs that need no data: `plan` and `simulate`.
- `layout_problems.py`: The conflicts of a layout with the number of ranks and the settings, and the numbers of ranks
  that a run may have.
- `local_nodes.py`: Several nodes on this machine, for learning and for tests: `--nodes 3` starts the command once for
  each of them.
- `node_admission.py`: The admission of nodes to a run: the head examines each node that comes, before the start and
  while the run lasts.
- `node_networks.py`: A network of its own for each node that this machine plays: namespaces on one bridge, for root on
  Linux.
- `node_start.py`: The start of a training on several nodes, by the same command on each of them.
- `nodes_like_this.py`: The machines of `plan --nodes`: several that are like this one, with a given or measured link
  between them.
- `option_checks.py`: Checks that refuse invalid options before a process starts.
- `python_result.py`: The result of a verb as a Python object: the keys of its `--json` as attributes.
- `resume_command.py`: The command that resumes a run: its job, run folder, ranks, device, layout, update rule,
  compression and settings.
- `start_folder.py`: The run folder of a command that starts processes: which one it is, and whether it can be written.
- `comparisons/`: Comparisons of layouts with each other: side by side, or one as the reference of another.
"""
