"""The world of a user's own script: torch's default group, a launcher's world, or this process alone."""

import atexit
import os

import torch
import torch.distributed as dist

from paceline.comm.process_group import LaunchInfo, World
from paceline.config.settings import Settings
from paceline.errors import PacelineError, raise_all
from paceline.launch.launcher_variables import detect_world
from paceline.launch.rendezvous import adopt_launcher_variables
from paceline.planner.layout.execution_plan import JobFacts, Resources, choose_backend
from paceline.planner.layout.host_resources import visible_gpus
from paceline.profiling.backends import available_backends


def open_current_world(*, device: str, settings: Settings) -> World:
    """Return the world of this process. Every rank calls this.

    If torch has a default group already, it becomes the world, and whoever created the group also destroys it.

    Raises:
        MachineError, UsageError, Problems: the ranks can't connect, or a backend is not available.
    """
    train_settings = settings.train
    if dist.is_available() and dist.is_initialized():
        existing_world = _adopt_default_group(train_settings.timeout_seconds)
        atexit.register(existing_world.release_group)
        return existing_world
    device_type = ("cuda" if visible_gpus() else "cpu") if device == "auto" else device
    launcher = detect_world(os.environ)
    if launcher is not None:
        adopt_launcher_variables(launcher, os.environ)
    ranks = 1 if launcher is None else launcher.world_size
    problems: list[PacelineError] = []
    facts = JobFacts(global_batch_size=1, backend=train_settings.backend, built_in_backends=available_backends())
    backend, _ = choose_backend(Resources(ranks=ranks, device=device_type), facts, problems)
    raise_all(problems)
    launch_info = LaunchInfo.read(os.environ) if launcher is not None else LaunchInfo()
    world = World.join(
        launch_info=launch_info,
        device_type=device_type,
        backend=backend,
        timeout_seconds=train_settings.timeout_seconds,
    )
    atexit.register(world.close)
    return world


def _adopt_default_group(timeout_seconds: float) -> World:
    """Return torch's default group as a `World`."""
    local_rank = int(os.environ.get("LOCAL_RANK", dist.get_rank()))
    backend = dist.get_backend()
    on_gpu = "nccl" in backend and torch.cuda.is_available()
    return World(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        local_rank=local_rank,
        device=torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu"),
        backend=backend,
        group=dist.group.WORLD if dist.get_world_size() > 1 else None,
        timeout_seconds=timeout_seconds,
    )
