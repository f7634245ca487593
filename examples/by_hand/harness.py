"""What the programs with several processes share: starting ranks, choosing devices, comparing with one process.

`run_ranks(work, ranks)` calls `work(rank, ranks)` in that many processes and returns what each call returned.
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

TIMEOUT = 60  # seconds: a rank that waits for a message that nobody sends must fail, not wait for ever
ROUNDING = (
    1e-5  # of the largest value. Sums in another order differ by about 1e-7 of it in float32, a mistake by far more
)

# The ranks find each other over the loopback interface, so that no firewall and no host name matters.
if sys.platform in ("linux", "darwin"):
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")


def choose_device(rank: int, ranks: int) -> torch.device:
    """Return a GPU for each rank where there are enough of them, otherwise the CPU."""
    return torch.device("cuda", rank) if torch.cuda.device_count() >= ranks else torch.device("cpu")


def run_ranks(work: Callable[[int, int], Any], ranks: int) -> list[Any]:
    """Run `work` in `ranks` processes. Raise if one of them fails or the time is over; leave no process behind."""
    # A forked process has everything imported already; one that is to use CUDA must be spawned.
    torch.optim.SGD([torch.zeros(())])  # the first optimizer of a process imports the compiler: once here, not per rank
    method = "fork" if sys.platform == "linux" and not torch.cuda.is_available() else "spawn"
    with tempfile.TemporaryDirectory() as folder:
        context = mp.start_processes(_work_as_rank, (work, ranks, folder), ranks, join=False, start_method=method)
        deadline = time.monotonic() + TIMEOUT + 5  # the ranks' own timeout comes first: it names the operation
        try:
            while not context.join(timeout=1):  # raises what a rank raised, and ends the other ranks
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
        init_method=Path(folder, "store").as_uri(),  # the ranks meet in a file: no port can be taken
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=TIMEOUT),
    )
    try:
        result = work(rank, ranks)
    except Exception as error:
        print(f"rank {rank}: {error}", file=sys.stderr, flush=True)  # the parent shows one rank alone
        raise
    torch.save(result, Path(folder, f"{rank}.pt"))
    dist.barrier()  # nobody leaves while another rank still reads from it
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
        same = same and difference <= allowed  # a NaN is not
        print(f"{name:18}{largest:12.6f}{ours.abs().max().item():12.6f}{difference:12.1e}{allowed:12.1e}")
    print("equal up to rounding" if same else "DIFFERENT")
    return 0 if same else 1


def flatten(tensors: Any) -> torch.Tensor:
    """Return all tensors as one vector, so that one number compares them."""
    return torch.cat([tensor.detach().cpu().flatten() for tensor in tensors])
