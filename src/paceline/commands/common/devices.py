"""Checks of the requested ranks and devices against this machine and the launcher's world."""

import json
import subprocess
import sys
from collections.abc import Sequence

from paceline.config.layout import Layout
from paceline.console.formatting import did_you_mean, plural
from paceline.errors import PacelineError, UsageError
from paceline.faults import Fault
from paceline.launch.launcher_variables import JoinedWorld
from paceline.nodes.node_place import NodePlace
from paceline.planner.layout.execution_plan import refuse_backend
from paceline.planner.layout.host_resources import usable_cores, visible_gpus

_MAX_RANKS_PER_CORE = 64


def choose_device(text: str, problems: list[PacelineError]) -> str:
    """Return the requested device; for `auto`, `cuda` if this machine has a GPU, else `cpu`.

    An unknown or missing device is added to `problems`.
    """
    if text not in ("auto", "cpu", "cuda"):
        hint = "--device auto | cpu | cuda"
        problems.append(
            UsageError(f"{text!r} is not a device.", cause=did_you_mean(text, ["auto", "cpu", "cuda"]), hint=hint)
        )
    if text == "cuda" and not visible_gpus():
        problems.append(
            UsageError("--device cuda: this machine has no visible GPU.", hint="nvidia-smi, or --device cpu")
        )
    return ("cuda" if visible_gpus() else "cpu") if text == "auto" else text


def choose_ranks(
    requested_ranks: int | None,
    joined: JoinedWorld | None,
    device: str,
    problems: list[PacelineError],
    *,
    option: str = "--ranks",
) -> int:
    """Return the number of ranks: the requested number, the number that another launcher started, or one per GPU.

    `option` is the one with which the number was requested.
    """
    if requested_ranks is not None and requested_ranks < 1:
        problems.append(UsageError(f"{option} {requested_ranks}: a run needs at least one rank.", hint=f"{option} 2"))
        return 1
    if joined is not None:
        if requested_ranks is not None and requested_ranks != joined.world_size:
            problems.append(_rank_count_error(requested_ranks, joined))
        return joined.world_size
    gpus = visible_gpus() if device == "cuda" else 0
    if gpus and requested_ranks is not None and requested_ranks > gpus:
        problems.append(
            UsageError(
                f"{option} {requested_ranks}, but this machine has {plural(gpus, 'GPU')}.", hint=f"{option} {gpus}"
            )
        )
    cores = usable_cores()
    if requested_ranks is not None and requested_ranks > _MAX_RANKS_PER_CORE * cores:
        cause = "each rank is a process with its own model"
        problems.append(
            UsageError(
                f"{option} {requested_ranks}, but this machine has {plural(cores, 'core')}.",
                cause=cause,
                hint=f"{option} {cores}",
            )
        )
    return requested_ranks or gpus or 1


def choose_ranks_of_nodes(
    requested_per_node: int | None, place: NodePlace, layout: Layout | None, device: str, problems: list[PacelineError]
) -> int:
    """Return the number of ranks of all nodes: the requested number on each, what the layout needs, or one per GPU."""
    needed = layout.ranks if layout is not None else 0
    if requested_per_node is None and needed and needed % place.num_nodes == 0:
        requested_per_node = needed // place.num_nodes
    return place.num_nodes * choose_ranks(requested_per_node, None, device, problems, option="--ranks-per-node")


def _rank_count_error(requested_ranks: int, joined: JoinedWorld) -> UsageError:
    if joined.kind != "environment":
        return UsageError(
            f"--ranks {requested_ranks}, but {joined.kind} started {plural(joined.world_size, 'process')}.",
            hint="leave --ranks out",
        )
    return UsageError(
        f"--ranks {requested_ranks}, but the environment has RANK={joined.rank} WORLD_SIZE={joined.world_size}: "
        "a launcher started this process as one of these ranks.",
        cause="they may be left over from another command" if joined.world_size == 1 else "",
        hint="unset RANK WORLD_SIZE, if no launcher set them; otherwise leave --ranks out",
    )


def refuse_missing_backend(backend: str) -> list[PacelineError]:
    """Return an error if this build of torch lacks the backend.

    A child process imports torch to find out. This process must not import torch before the environment variables that
    select kernels are set.
    """
    if backend in ("auto", "gloo"):
        return []
    query = "import json; from paceline.profiling import backends; print(json.dumps(backends.available_backends()))"
    try:
        completed = subprocess.run(
            [sys.executable, "-c", query], capture_output=True, text=True, timeout=60, check=True
        )
        return refuse_backend(backend, json.loads(completed.stdout.splitlines()[-1]))
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return []  # if the backend is missing, the ranks report it


def refuse_nested_threads(joined: JoinedWorld | None, faults: Sequence[Fault], problems: list[PacelineError]) -> None:
    """Add a problem if a launcher started several processes for layout threads, or if a fault is not on rank 0."""
    faulty_ranks = [fault.rank for fault in faults if fault.rank]
    if faulty_ranks:
        problems.append(
            UsageError(
                f"a fault on rank {faulty_ranks[0]}, but layout threads is one process, rank 0.",
                hint='--faults "kill rank=0 step=50", or --layout ddp',
            )
        )
    if joined is not None and joined.world_size > 1:
        problems.append(
            UsageError(
                f"layout threads is one process, but {joined.kind} started {plural(joined.world_size, 'process')}.",
                hint="--layout ddp, or one process: paceline train JOB --layout threads --ranks 2",
            )
        )
