"""One model in the memory of one machine, for several processes that write to it without locks."""

import os
import socket
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn

from paceline.comm.process_group import World
from paceline.errors import MachineError
from paceline.parallel.module_access.parameters import trainable_parameters

_MEMORY = Path("/dev/shm")
_ALIGNED = 64


class SharedModel:
    """The trainable parameters and the buffers of all ranks, in one file in memory whose name is gone once all have it.

    Beside them two rows of counts: `taken` has a place for each worker, which alone writes to it. `shadow` has one for
    each parameter: every update adds 1 to it as it adds to the parameter, without a lock, so that what is missing there
    in the end shows how often two writers have met. It is a proxy: the weights' own lost updates are not counted.
    """

    def __init__(self, model: nn.Module, *, world: World) -> None:
        self._world = world
        weights = [member.parameter for member in trainable_parameters(model)]
        tensors = [*weights, *(buffer for buffer in model.buffers() if buffer.is_contiguous() and buffer.numel())]
        sizes = [_aligned(tensor.nbytes) for tensor in tensors]
        memory = _open(sum(sizes) + _aligned(8 * (world.world_size + len(weights))), world=world)
        *parts, rows = memory.split([*sizes, memory.numel() - sum(sizes)])
        for tensor, part in zip(tensors, parts, strict=True):
            _move(tensor, part[: tensor.nbytes], write=world.is_main)
        counts = rows.view(torch.int64)
        self.taken, self.shadow = counts[: world.world_size], counts[world.world_size :][: len(weights)]
        world.barrier()

    def others(self) -> int:
        """Updates that the other workers have taken until now."""
        return int(self.taken.sum() - self.taken[self._world.rank])

    def count(self) -> None:
        """This worker has taken one."""
        self.taken[self._world.rank] += 1
        self.shadow += 1

    @property
    def lost(self) -> tuple[int, int]:
        """How many of the shadow's additions are not in it, and how many were made; while nobody adds."""
        made = int(self.taken.sum()) * len(self.shadow)
        return made - int(self.shadow.sum()), made


def _open(size: int, *, world: World) -> Tensor:
    """The same bytes for every rank of this machine.

    Raises:
        MachineError: the ranks are on several machines, or there is not so much shared memory.
    """
    hosts = sorted(set(world.gather_json(socket.gethostname())))
    if len(hosts) > 1:
        raise MachineError(
            f"--update hogwild needs all ranks on one machine, they are on {', '.join(hosts)}.",
            hint="--update sync, or all ranks on one machine",
        )
    handle, path = _shared_file(size, world=world, has_name=False)
    if not all(world.gather_json(os.access(path, os.R_OK | os.W_OK))):  # ranks that see no processes of each other
        handle, path = _shared_file(size, world=world, has_name=True)
    memory = torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
    world.barrier()
    if world.is_main:
        os.close(handle)
        if not path.startswith("/proc/"):
            Path(path).unlink()
    return memory


def _shared_file(size: int, *, world: World, has_name: bool) -> tuple[int, str]:
    """Return rank 0's handle of new memory, and its path for all: without a name it goes with whoever is killed."""
    handle, path, problem = -1, "", ""
    if world.is_main:
        try:
            if has_name or not hasattr(os, "memfd_create"):
                handle, path = tempfile.mkstemp(prefix="paceline-", dir=_MEMORY if _MEMORY.is_dir() else None)
            else:
                handle = os.memfd_create("paceline-hogwild")
                path = f"/proc/{os.getpid()}/fd/{handle}"
            os.posix_fallocate(handle, 0, size)
        except OSError as error:
            problem = str(error)
    path, problem = world.share_json([path, problem])
    if problem:
        raise MachineError(
            f"there is no room for {size} bytes of shared memory: {problem}.",
            where=str(_MEMORY),
            hint="a container with more of it (--shm-size)",
        )
    return handle, path


def _move(tensor: Tensor, part: Tensor, *, write: bool) -> None:
    """Rank 0's values are everybody's."""
    view = part.view(tensor.dtype).view(tensor.shape)
    if write:
        view.copy_(tensor.detach())
    tensor.data = view


def _aligned(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED
