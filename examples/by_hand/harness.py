"""Helpers of the programs with several processes: start ranks, choose devices, compare with one process.

`run_ranks(work, ranks)` starts `ranks` processes, calls `work(rank, ranks)` in each, and returns the results.
`compare` prints a table and returns an exit code. No program needs `torchrun`, a free port or a network.
"""

import os
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

TIMEOUT = 60  # seconds: a rank that waits for a message that nobody sends must fail, not wait forever
# The allowed difference as a fraction of the largest value. In float32, another order of sums changes the result by
# about 1e-7 of that value; mistakes change it by far more.
ROUNDING = 1e-5

# The ranks find each other over the loopback interface, so that no firewall and no host name matters.
if sys.platform in ("linux", "darwin"):
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")


def choose_device(rank: int, ranks: int) -> torch.device:
    """Return a GPU for this rank if every rank can have one, otherwise the CPU."""
    return torch.device("cuda", rank) if torch.cuda.device_count() >= ranks else torch.device("cpu")


def run_ranks(work: Callable[[int, int], Any], ranks: int) -> list[Any]:
    """Run `work(rank, ranks)` in each of `ranks` processes, and return the results by rank.

    If a process fails or the time limit is over, end all processes and raise an error.
    """
    # The first optimizer imports the compiler: import it once here, not in each rank.
    torch.optim.SGD([torch.zeros(())])
    # A forked process has the parent's imports, but a process that uses CUDA must be spawned.
    method = "fork" if sys.platform == "linux" and not torch.cuda.is_available() else "spawn"
    with tempfile.TemporaryDirectory() as folder:
        context = mp.start_processes(_work_as_rank, (work, ranks, folder), ranks, join=False, start_method=method)
        deadline = time.monotonic() + TIMEOUT + 5  # the ranks' own timeout comes first: it names the operation
        try:
            while not context.join(timeout=1):  # raises a rank's error, and ends the other ranks
                if time.monotonic() > deadline:
                    raise TimeoutError(f"the ranks have not finished after {TIMEOUT} s")
        finally:
            for process in context.processes:
                process.kill()
        return [torch.load(Path(folder, f"{rank}.pt")) for rank in range(ranks)]


def _work_as_rank(rank: int, work: Callable[[int, int], Any], ranks: int, folder: str) -> None:
    torch.set_num_threads(1)  # several ranks share the cores
    device = choose_device(rank, ranks)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        init_method=Path(folder, "store").as_uri(),  # the ranks meet in a file, so no port is needed
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=TIMEOUT),
    )
    try:
        result = work(rank, ranks)
    except Exception as error:
        print(f"rank {rank}: {error}", file=sys.stderr, flush=True)  # the parent shows the error of one rank only
        raise
    torch.save(result, Path(folder, f"{rank}.pt"))
    dist.barrier()  # no rank exits while another still reads from it
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may outlive the interpreter


def compare(rows: dict[str, tuple[torch.Tensor, torch.Tensor]]) -> int:
    """Print one row for each pair (one process, by hand); return 0 if all are equal up to rounding, otherwise 1."""
    print(f"\n{'':18}{'one process':>12}{'by hand':>12}{'difference':>12}{'allowed':>12}")
    same = True
    for name, (alone, ours) in rows.items():
        alone, ours = alone.detach().double().cpu(), ours.detach().double().cpu()
        largest = alone.abs().max().item()
        difference, allowed = (alone - ours).abs().max().item(), ROUNDING * largest
        same = same and difference <= allowed  # False for a NaN
        print(f"{name:18}{largest:12.6f}{ours.abs().max().item():12.6f}{difference:12.1e}{allowed:12.1e}")
    print("equal up to rounding" if same else "DIFFERENT")
    return 0 if same else 1


def flatten(tensors: Any) -> torch.Tensor:
    """Return all tensors as one vector, so that one number compares them."""
    return torch.cat([tensor.detach().cpu().flatten() for tensor in tensors])
