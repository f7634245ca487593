"""A report of a rank's memory by purpose, for the error that says that the rank has run out of memory."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from paceline.errors import OutOfMemory
from paceline.launch.failures.oom_detection import (
    MemoryLimit,
    is_out_of_memory,
    out_of_memory_error,
    process_bytes_under,
    process_memory,
    release_freed_memory,
    tightest_memory_limit,
)
from paceline.profiling.model_tracing.memory_tracker import memory_at_rest
from paceline.trainer.setup.build_training_setup import TrainingSetup

_PROCESS_MEASURES = ("VmRSS", "VmHWM", "VmSize", "VmData")


@dataclass(frozen=True, kw_only=True)
class MemoryBaseline:
    """The memory that the process used before the model was built.

    `used_bytes` has each measure to which a limit may apply, by its name in `/proc/self/status`. The baseline that
    `after_build` returns differs in one of them: its peak of resident memory (VmHWM) was read after the build.
    """

    used_bytes: Mapping[str, int]

    @classmethod
    def measure(cls) -> "MemoryBaseline":
        """Return the current memory use of the process."""
        return cls(used_bytes={name: process_memory(name) for name in _PROCESS_MEASURES})

    def after_build(self) -> "MemoryBaseline":
        """Release freed memory, and return this baseline with the peak of resident memory (VmHWM) after the build.

        A later peak above this value is then a peak of the steps, not of the build.
        """
        release_freed_memory()
        return replace(self, used_bytes={**self.used_bytes, "VmHWM": process_memory("VmHWM")})

    def used_bytes_for(self, limit: MemoryLimit | None) -> int:
        """Return the used bytes in the measure to which this limit applies."""
        name = "VmRSS" if limit is None or not limit.is_own else "VmSize" if "space" in limit.name else "VmData"
        return self.used_bytes[name]


@contextmanager
def explain_out_of_memory(setup: TrainingSetup | None, memory_baseline: MemoryBaseline) -> Iterator[None]:
    """Return a context that converts an out-of-memory error into an error that lists the memory by purpose.

    `setup` is None while the model is built.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, OutOfMemory) or not is_out_of_memory(error):
            raise
        raise _describe_memory(error, setup, memory_baseline) from error


def _describe_memory(error: Exception, setup: TrainingSetup | None, memory_baseline: MemoryBaseline) -> OutOfMemory:
    """Return the error that lists the memory by purpose."""
    if setup is None:
        limit = tightest_memory_limit()
        bytes_by_purpose = {
            "before its model": memory_baseline.used_bytes_for(limit),
            "building the model": max(0, process_bytes_under(limit) - memory_baseline.used_bytes_for(limit)),
        }
        return out_of_memory_error(error, phase="building the model", held=bytes_by_purpose, limit=limit)
    parameters = [member.parameter for member in setup.named_parameters]
    model_memory = memory_at_rest(model=setup.model, optimizers=setup.update.optimizers, updated_tensors=parameters)
    model_bytes = {
        "parameters": model_memory.parameters + model_memory.buffers,
        "gradients": model_memory.gradients,
        "optimizer": model_memory.optimizer,
    }
    if setup.world.device.type == "cuda":
        return _describe_gpu_memory(error, model_bytes, setup.world.device)
    limit = tightest_memory_limit()
    baseline_bytes, used_bytes = memory_baseline.used_bytes_for(limit), process_bytes_under(limit)
    bytes_by_purpose = {
        **model_bytes,
        "activations": max(0, used_bytes - baseline_bytes - sum(model_bytes.values())),
        "rest": baseline_bytes,
    }
    if limit is not None and not limit.is_own:
        bytes_by_purpose["other processes"] = max(0, limit.used_bytes - used_bytes)
    return out_of_memory_error(error, held=bytes_by_purpose, limit=limit)


def _describe_gpu_memory(error: Exception, model_bytes: Mapping[str, int], device: torch.device) -> OutOfMemory:
    """Return the error for a GPU. `rest` is the allocator's reserve, the CUDA context and other processes' memory."""
    free, total = torch.cuda.mem_get_info(device)
    allocated = torch.cuda.memory_allocated(device)
    bytes_by_purpose = {
        **model_bytes,
        "activations": max(0, allocated - sum(model_bytes.values())),
        "rest": max(0, total - free - allocated),
    }
    name = torch.cuda.get_device_name(device)
    return out_of_memory_error(
        error, held=bytes_by_purpose, limit=MemoryLimit(name=name, limit_bytes=total, used_bytes=total - free)
    )
