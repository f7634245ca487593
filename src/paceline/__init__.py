"""Paceline trains any PyTorch model in parallel, and proves that the parallel run is the same training.

Start with `cli.py`.

- `__main__.py`: The entry point of `python -m paceline`.
- `bytes_sent.py`: The bytes that a rank sends: how many each collective needs, and a counter that the transport
  updates.
- `cli.py`: The command line: it parses arguments, runs a verb, prints the result and exits with a code.
- `errors.py`: The exception hierarchy: each error says what happened, where, the likely cause, and what to type.
- `events.py`: The events of a run, as typed values, and the bus that passes them to sinks.
- `faults.py`: Fault injection, for tests and `--faults`: a fault has a kind, a rank, a step and a point within the
  step.
- `job.py`: A job: a description of what to train, in plain Python values.
- `job_field_checks.py`: Checks of a job's fields: each error names an invalid field and the line to write instead.
- `job_parameters.py`: The parameters of `make_job`: text and TOML values are converted to the type of the annotation or
  the default.
- `job_transfer.py`: Transfer of a `Job` that was made in Python to the processes that run it.
- `plugins.py`: Dynamic imports: `resolve("my.pkg:Thing")` returns the object.
- `user_code.py`: Detection of the user's own code: files that are not part of Paceline, of an installed package, or of
  Python.
- `checkpoint/`: Training state in checkpoints: what is saved, how ranks write it together, and how another layout reads
  it.
- `comm/`: Process groups: the world of ranks, the groups of a mesh, ranks simulated by threads, errors raised on all
  ranks.
- `commands/`: One file for each command of `paceline`, and the same commands as Python functions.
- `config/`: Read and check what the user asked for: settings, layout, update rule, compression and job reference.
- `console/`: Console output, and the formatting of numbers and lists.
- `custom_loop/`: `pl.place`: a parallel model for the user's own training loop.
- `data/`: Loading data: each replica reads its own microbatches of every global batch.
- `filesystem/`: Files and folders: atomic writes, locks, full disks, temporary folders.
- `hf/`: Jobs from Hugging Face configs and folders: `pl.hf.job(...)`. transformers is imported when it is first used.
- `launch/`: Process launch: starts ranks, or joins ranks that torchrun, mpirun or srun started.
- `measured_planning/`: Plan by measurement on this machine: profile the user's job, replay layouts, and time the
  finalists.
- `nodes/`: The machines (nodes) of a run: how their processes meet, what each says of itself, and the links between
  them.
- `parallel/`: Parallelize a model: by data, sharding, tensors, context, experts and pipeline stages, and with
  checkpointing.
- `planner/`: Plan a training without a device: forecast memory and step time, search layouts and advise, from a model
  profile.
- `profiling/`: Measure machines, and trace what a model computes, stores and communicates.
- `reporting/`: `report.html`: runs, plans, comparisons and verify results as pages.
- `run_folder/`: The folder of a run, and the plan file in it.
- `schedule/`: Build, read, check, simulate and draw pipeline schedules.
- `script_check/`: Check training scripts that do not use Paceline: record a run of an unmodified script, and judge it.
- `step/`: The training step: forward, backward, reduction, optimizer update.
- `submit/`: The files that hand a training in to a scheduler, and what the scheduler would refuse of them.
- `torch_internals/`: Private torch APIs, and the dispatch modes and random streams that are built on them.
- `trainer/`: Training runs: the loop, the session of one rank, saving, logging, evaluation.
- `verification/`: `paceline verify`: check that a layout computes the same training as one process.
"""

from paceline.plugins import lazy_attributes

__version__ = "0.1.0"

_PUBLIC = {
    "Job": "paceline.job",
    "EarlyStopping": "paceline.job",
    "Run": "paceline.trainer.run",
    "World": "paceline.comm.process_group",
    "hf": "paceline.hf",
    "place": "paceline.custom_loop.place",
    "check": "paceline.script_check.loop_check",
    "record": "paceline.verification.fingerprints.record",
    "train": "paceline.commands.python_functions",
    "verify": "paceline.commands.python_functions",
    "plan": "paceline.commands.python_functions",
    "simulate": "paceline.commands.python_functions",
    "evaluate": "paceline.commands.python_functions",
    "compare": "paceline.commands.python_functions",
    "report": "paceline.commands.report",
    "PacelineError": "paceline.errors",
    "UsageError": "paceline.errors",
    "JobError": "paceline.errors",
    "LayoutError": "paceline.errors",
    "ResumeError": "paceline.errors",
    "CheckpointError": "paceline.errors",
    "RunError": "paceline.errors",
    "DataError": "paceline.errors",
    "NonFiniteError": "paceline.errors",
    "DesyncError": "paceline.errors",
    "MachineError": "paceline.errors",
    "ExitCode": "paceline.errors",
}

__all__ = ["__version__", *_PUBLIC]

__getattr__ = lazy_attributes(_PUBLIC, package=__name__)


def __dir__() -> list[str]:
    return sorted(__all__)
