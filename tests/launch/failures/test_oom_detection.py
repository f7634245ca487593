"""Out-of-memory errors and kills are told apart from others, with the part of the step."""

import errno
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import paceline.launch.failures.oom_detection as short_memory
from paceline.data.fetch import worker_error
from paceline.errors import DataError, OutOfMemory
from paceline.launch.failures.failure_record import failure_from_exception, failure_from_status
from paceline.launch.failures.oom_detection import (
    MemoryLimit,
    explain_data_worker_error,
    is_out_of_memory,
    oom_kill_count,
    out_of_memory_error,
    phase_of,
    process_memory,
    release_freed_memory,
    requested_bytes,
)


def raised(call: Any) -> BaseException:
    with pytest.raises(BaseException) as caught:
        call()
    return caught.value


def test_what_torch_says_of_an_allocation_that_fails_is_known() -> None:
    error = raised(lambda: torch.empty(1 << 50, dtype=torch.uint8))
    assert is_out_of_memory(error) and requested_bytes(error) == 1 << 50


@pytest.mark.parametrize(
    ("error", "is_one"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB."), True),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), True),
        (RuntimeError("std::bad_alloc"), True),
        (
            DataError("collating failed: DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes."),
            True,
        ),
        (OSError(errno.ENOSPC, "No space left on device"), False),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_only_memory_is_a_shortage(error: BaseException, is_one: bool) -> None:
    assert is_out_of_memory(error) is is_one
    assert failure_from_exception(error, rank=1).is_short_of_memory is is_one


def test_how_much_was_asked_for() -> None:
    assert requested_bytes(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB.")) == 5 << 29
    assert requested_bytes(MemoryError("Unable to allocate 12.0 MiB for an array")) == 12 << 20
    assert requested_bytes(MemoryError("Unable to allocate 16.0 TiB for an array")) == 16 << 40
    assert requested_bytes(MemoryError()) is None


def short(*_: Any) -> Any:
    raise MemoryError


class Backward(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(_: Any, *gradients: torch.Tensor) -> Any:
        return short()


class Forward(nn.Module):
    def forward(self, _: torch.Tensor) -> torch.Tensor:
        return short()  # type: ignore[no-any-return]


def backward() -> None:
    x = torch.ones(2, requires_grad=True)
    Backward.apply(x).sum().backward()  # type: ignore[no-untyped-call]


def in_the_update() -> None:
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    optimizer.register_step_pre_hook(short)
    optimizer.step()


@pytest.mark.parametrize(
    ("call", "part"),
    [(lambda: nn.Sequential(Forward())(torch.ones(1)), "forward"), (backward, "backward"),
     (in_the_update, "optimizer"), (short, "")],
)  # fmt: skip
def test_the_part_of_the_step_is_seen(call: Any, part: str) -> None:
    error = raised(call)
    assert phase_of(error.__traceback__) == part
    told = out_of_memory_error(
        error,
        held={"parameters": 3 << 20},
        limit=MemoryLimit(name="this room", limit_bytes=4 << 20, used_bytes=3 << 20),
    )
    assert told.part == part and ("in " + part in told.what if part else " in " not in told.what)
    assert "this room is limited to 4.0 MiB, 3.0 MiB were used" in str(told) and "parameters: 3.0 MiB" in str(told)
    assert told.as_json()["held"] == {"parameters": 3 << 20}


def test_a_kill_is_for_memory_only_where_the_kernel_has_counted_one(tmp_path: Path) -> None:
    assert oom_kill_count(cgroup_root=tmp_path, machine=tmp_path / "vmstat") is None
    (tmp_path / "vmstat").write_text("nr_free_pages 1\noom_kill 7\n")
    assert oom_kill_count(cgroup_root=tmp_path, machine=tmp_path / "vmstat") == 7
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 2\n")
    assert oom_kill_count(cgroup_root=tmp_path, machine=tmp_path / "vmstat") == 2
    (tmp_path / "memory.events").write_text("low 0\nhigh 0\nmax 9\noom 1\noom_kill 1\n")
    assert oom_kill_count(cgroup_root=tmp_path, machine=tmp_path / "vmstat") == 1


def test_only_a_kill_that_was_for_memory_falls_back() -> None:
    assert failure_from_status(0, status=-signal.SIGKILL, is_oom_kill=True).is_short_of_memory
    assert not failure_from_status(0, status=-signal.SIGKILL).is_short_of_memory
    assert not failure_from_status(0, status=-signal.SIGSEGV, is_oom_kill=True).is_short_of_memory
    assert failure_from_status(0, status=-signal.SIGKILL, is_oom_kill=True).said["error"] == OutOfMemory.__name__


def test_what_was_freed_goes_back_and_the_most_begins_anew() -> None:
    pieces = [bytearray(100_000) for _ in range(1000)]
    most, last = process_memory("VmHWM"), pieces[-1]
    del pieces
    kept = process_memory()
    release_freed_memory()
    assert len(last) == 100_000 and process_memory() < kept - (60 << 20)
    assert process_memory("VmHWM") < most


def test_a_kill_in_a_group_inside_the_root_s_is_counted(tmp_path: Path) -> None:
    """As under Slurm with the first version of control groups: the root's own file counts none of them."""
    own = tmp_path / "cgroup"
    own.write_text("9:name=systemd:/\n4:cpu,memory:/slurm/job_7\n")
    for place, kills in (("memory", 0), ("memory/slurm", 0), ("memory/slurm/job_7", 3)):
        (tmp_path / place).mkdir()
        (tmp_path / place / "memory.oom_control").write_text(f"under_oom 0\noom_kill {kills}\n")
    assert oom_kill_count(cgroup_root=tmp_path, machine=tmp_path / "none", process_cgroups=own) == 3


@pytest.mark.parametrize(
    ("said", "words", "hint"),
    [
        ("DataLoader worker (pid 7) is killed by signal: Bus error. It is possible that dataloader's workers are out of "
         "shared memory.", "/dev/shm is small, the shared memory through which data workers pass samples: "
         "1.0 MiB of 64.0 MiB are free now", "--shm-size"),
        ("unable to mmap 8 bytes from file </torch_7_1>: Cannot allocate memory (12)", "/dev/shm is small", "--shm-size"),
        ("unable to write to file </torch_71_1_0>: No space left on device (28)", "/dev/shm was full", "--shm-size"),
        ("unable to open shared memory object </torch_1> in read-write mode: Too many open files (24)", "ulimit -n",
         "ulimit -n"),
        ("received 0 items of ancdata", "ulimit -n", "ulimit -n"),
    ],
)  # fmt: skip
def test_what_data_workers_lack_is_named(said: str, words: str, hint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(short_memory, "_shared_memory_bytes", lambda: (1 << 20, 64 << 20))
    found = explain_data_worker_error(said)
    assert found is not None and words in found[0] and hint in found[1] and "--data.workers 0" in found[1]
    told = worker_error(RuntimeError(said), doing="collating samples 1, 2", hint="collate=...")
    assert (told.cause, told.hint) == found
    died = failure_from_exception(RuntimeError(f"DataLoader worker (pid 7) exited unexpectedly: {said}"), rank=0)
    assert (died.said["cause"], died.said["hint"]) == found


@pytest.mark.parametrize("room", [(1 << 30, 2 << 30), (0, 0)])
@pytest.mark.parametrize(
    "said",
    [
        "DataLoader worker (pid 7) is killed by signal: Bus error. It is possible that dataloader's workers are out of "
        "shared memory.",
        "unable to mmap 8 bytes from file </torch_7_1>: Cannot allocate memory (12)",
    ],
)
def test_shared_memory_with_room_is_no_reason(
    said: str, room: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(short_memory, "_shared_memory_bytes", lambda: room)
    assert explain_data_worker_error(said) is None
    full = explain_data_worker_error("unable to write to file </torch_71_1_0>: No space left on device (28)")
    assert full is not None and full[0].startswith("/dev/shm was full")


def test_other_troubles_of_data_workers_keep_their_hint() -> None:
    assert explain_data_worker_error("stack expects each tensor to be equal size") is None
    assert worker_error(RuntimeError("stack expects"), doing="collating", hint="collate=...").hint == "collate=..."
    died = failure_from_exception(RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed."), rank=0)
    assert "--data.workers 0 shows" in died.said["hint"]
