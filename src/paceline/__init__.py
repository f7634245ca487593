"""Paceline trains any PyTorch model in parallel, and proves that the parallel run is the same training."""

from paceline.plugins import lazy_attributes

__version__ = "0.1.0"

_PUBLIC = {
    "Job": "paceline.job",
    "EarlyStopping": "paceline.job",
    "Run": "paceline.train.run",
    "World": "paceline.world",
    "hf": "paceline.hf",
    "place": "paceline.train.placing",
    "record": "paceline.prove.record",
    "train": "paceline.verbs.functions",
    "verify": "paceline.verbs.functions",
    "plan": "paceline.verbs.functions",
    "simulate": "paceline.verbs.functions",
    "evaluate": "paceline.verbs.functions",
    "compare": "paceline.verbs.functions",
    "report": "paceline.verbs.report",
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
