"""Paceline trains any PyTorch model in parallel, and proves that the parallel run is the same training."""

from paceline.plugins import lazy_attributes

__version__ = "0.1.0"

_PUBLIC = {
    "Job": "paceline.job",
    "EarlyStopping": "paceline.job",
    "Run": "paceline.trainer.run",
    "World": "paceline.comm.process_group",
    "hf": "paceline.hf",
    "place": "paceline.custom_loop.place",
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
