"""A model in the shared memory of one machine, which several processes update without locks (Hogwild)."""

import os
import socket
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn

from paceline.comm.process_group import World
from paceline.errors import MachineError
from paceline.parallel.module_access.parameters import trainable_parameters

_SHARED_MEMORY_FOLDER = Path("/dev/shm")
_ALIGNMENT = 64


class SharedModel:
    """The trainable parameters and buffers that all ranks share, in one shared memory file.

    The file also contains two arrays of counters. `worker_counts` has one counter per worker; each worker writes only
    to its own. `parameter_counts` has one counter per parameter, to which every update adds 1 without a lock, in the
    same way as it adds to the parameter. Missing counts at the end show how often two writers collided. They are an
    estimate of the lost updates of weights, which are not counted directly. If the memory has a file name, this name is
    removed as soon as all ranks have opened the file.
    """

    def __init__(self, model: nn.Module, *, world: World) -> None:
        self._world = world
        weights = [member.parameter for member in trainable_parameters(model)]
        tensors = [*weights, *(buffer for buffer in model.buffers() if buffer.is_contiguous() and buffer.numel())]
        sizes = [_align(tensor.nbytes) for tensor in tensors]
        memory = _open_shared_memory(sum(sizes) + _align(8 * (world.world_size + len(weights))), world=world)
        *tensor_memories, counter_memory = memory.split([*sizes, memory.numel() - sum(sizes)])
        for tensor, tensor_memory in zip(tensors, tensor_memories, strict=True):
            _move_storage(tensor, tensor_memory[: tensor.nbytes], write=world.is_main)
        counts = counter_memory.view(torch.int64)
        self.worker_counts = counts[: world.world_size]
        self.parameter_counts = counts[world.world_size :][: len(weights)]
        world.barrier()

    def count_peer_updates(self) -> int:
        """Return the number of updates by the other workers so far."""
        return int(self.worker_counts.sum() - self.worker_counts[self._world.rank])

    def record_update(self) -> None:
        """Count one update of this worker."""
        self.worker_counts[self._world.rank] += 1
        self.parameter_counts += 1

    @property
    def lost_and_all_additions(self) -> tuple[int, int]:
        """Return the number of lost and of all additions to `parameter_counts`; valid while no worker updates."""
        num_additions = int(self.worker_counts.sum()) * len(self.parameter_counts)
        return num_additions - int(self.parameter_counts.sum()), num_additions


def _open_shared_memory(size: int, *, world: World) -> Tensor:
    """Return memory of `size` bytes that all ranks of this machine share.

    Raises:
        MachineError: the ranks are on several machines, or there is not enough shared memory.
    """
    hosts = sorted(set(world.gather_json(socket.gethostname())))
    if len(hosts) > 1:
        raise MachineError(
            f"--update hogwild needs all ranks on one machine, but they are on {', '.join(hosts)}.",
            hint="--update sync, or all ranks on one machine",
        )
    descriptor, path = _create_shared_memory(size, world=world, has_name=False)
    if not all(world.gather_json(os.access(path, os.R_OK | os.W_OK))):  # as in containers without common PIDs
        descriptor, path = _create_shared_memory(size, world=world, has_name=True)
    memory = torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
    world.barrier()
    if world.is_main:
        os.close(descriptor)
        if not path.startswith("/proc/"):
            Path(path).unlink()
    return memory


def _create_shared_memory(size: int, *, world: World, has_name: bool) -> tuple[int, str]:
    """Create memory on rank 0; return its file descriptor there, and its path on all ranks.

    The memory comes from `os.memfd_create`: it has no file name, and is freed even if the ranks are killed. With
    `has_name`, or on systems without this function, the memory is a file. If the ranks are killed before rank 0 unlinks
    this file, the file remains.
    """
    descriptor, path, problem = -1, "", ""
    if world.is_main:
        try:
            if has_name or not hasattr(os, "memfd_create"):
                descriptor, path = tempfile.mkstemp(
                    prefix="paceline-", dir=_SHARED_MEMORY_FOLDER if _SHARED_MEMORY_FOLDER.is_dir() else None
                )
            else:
                descriptor = os.memfd_create("paceline-hogwild")
                path = f"/proc/{os.getpid()}/fd/{descriptor}"
            os.posix_fallocate(descriptor, 0, size)
        except OSError as error:
            problem = str(error)
    path, problem = world.share_json([path, problem])
    if problem:
        raise MachineError(
            f"there is no room for {size} bytes of shared memory: {problem}.",
            where=str(_SHARED_MEMORY_FOLDER),
            hint="a container with more shared memory (--shm-size)",
        )
    return descriptor, path


def _move_storage(tensor: Tensor, memory: Tensor, *, write: bool) -> None:
    """Move a tensor's storage to `memory`; with `write` (rank 0), copy its values there first."""
    view = memory.view(tensor.dtype).view(tensor.shape)
    if write:
        view.copy_(tensor.detach())
    tensor.data = view


def _align(size: int) -> int:
    """Round a number of bytes up to a multiple of the alignment."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT
