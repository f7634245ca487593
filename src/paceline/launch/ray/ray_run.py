"""A training under Ray Train, as the file that `paceline submit --to ray` writes describes and starts it."""

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from paceline.console.output import print_line
from paceline.errors import MachineError, PacelineError, UsageError
from paceline.plugins import resolve

_INSTALL = "pip install 'paceline[ray]', on all machines of the cluster"


@dataclass(frozen=True, kw_only=True)
class RayRun:
    """A training, and what Ray has to know about it."""

    name: str
    command: str
    """The command of each node, without its place among the nodes."""
    folder: str
    """The working folder, at the same path on all machines."""
    run: str
    """The run folder, relative to the working folder; all machines see it."""
    nodes: tuple[int, int]
    """The smallest and the largest number of nodes. Ray starts one worker for each node."""
    resources: Mapping[str, float]
    """The CPUs and GPUs of a node, as Ray names them."""
    hours: float
    """The time after which the training saves and stops."""
    max_failures: int
    """The largest number of times that Ray starts all workers again after it has lost one."""
    resize_seconds: float = 60.0
    """How often Ray looks whether the cluster has room for another number of nodes."""

    @property
    def is_elastic(self) -> bool:
        """Return whether Ray may change the number of nodes while the training runs."""
        return self.nodes[0] < self.nodes[1]


def run_on_ray(run: RayRun) -> int:
    """Train in the Ray cluster to which this process belongs, and return the exit code of the training.

    A stop signal asks the training to save and stop; the exit code then is 75.
    """
    try:
        if not Path(run.folder).is_dir():
            hint = "a folder on a disk that all machines share; cd to it, then paceline submit --to ray"
            raise UsageError(f"the working folder {run.folder} does not exist here.", hint=hint)
        os.chdir(run.folder)
        return _load_trainer()(run)
    except PacelineError as error:
        print_line(f"error: {error}", sys.stderr)
        return int(error.exit_code)


def _load_trainer() -> Callable[[RayRun], int]:
    """Return the function that trains with Ray, which is imported only here.

    Raises:
        MachineError: Ray is not installed, or its version lacks what is needed.
    """
    if find_spec("ray") is None:
        raise MachineError("Ray is not installed here.", hint=_INSTALL)
    try:
        fit: Callable[[RayRun], int] = resolve("paceline.launch.ray.ray_trainer:fit")
    except (ImportError, UsageError) as error:
        version = getattr(sys.modules.get("ray"), "__version__", "of an unknown version")
        raise MachineError(
            f"Ray {version} can't be used: {getattr(error, 'what', error)}.",
            cause="its version is below 2.60, ray[train] is not installed, or RAY_TRAIN_V2_ENABLED is 0",
            hint=_INSTALL,
        ) from None
    return fit
