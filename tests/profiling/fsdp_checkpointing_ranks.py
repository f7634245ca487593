"""Two ranks of `fully_shard`, with and without activation checkpointing, that print one JSON line of measurements."""

import json
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from paceline.config.activation_checkpointing import parse_remat
from paceline.examples.text import GPT
from paceline.parallel.activation_checkpointing.checkpointing import apply_remat
from paceline.profiling.model_tracing.communication_counter import CommunicationCounter
from paceline.profiling.model_tracing.memory_tracker import MemoryTracker, element_bytes, memory_at_rest

RANKS = 2
HEADERS = 20 + 32  # bytes of a packet on the loopback: IPv4, and TCP with its time stamps


def wire() -> int:
    """Bytes that were sent, without the headers: a busy machine sends smaller packets, and so more of them."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        if line.strip().startswith("lo:"):
            sent, packets = map(int, line.split()[9:11])
            return sent - HEADERS * packets
    return 0


def flows() -> dict[str, object]:
    """Messages of four megabytes, counted by us and by the kernel."""
    rank, found = dist.get_rank(), {}
    size = 1 << 20
    whole, part = torch.ones(size), torch.ones(size // RANKS)
    jobs = {
        "all_reduce": lambda: dist.all_reduce(whole),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, part),
        "send": lambda: dist.send(whole, 1) if rank == 0 else dist.recv(whole, 0),
        "exchange": lambda: [
            w.wait()
            for w in dist.batch_isend_irecv(
                [dist.P2POp(dist.isend, whole, 1 - rank), dist.P2POp(dist.irecv, torch.ones(size), 1 - rank)]
            )
        ],
    }
    for name, job in jobs.items():
        dist.barrier()
        before = wire()
        with CommunicationCounter() as sent:
            job()
        dist.barrier()
        total = torch.tensor([sent.total_bytes], dtype=torch.float64)
        dist.all_reduce(total)
        found[name] = {"counted": float(total), "wire": wire() - before, "flows": sent.as_json()}
    return found


def shard(policy: str, reshard: bool) -> dict[str, object]:
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(1)
    model = GPT(width=64, depth=4, heads=2, context=32, dropout=0.2)
    whole = element_bytes(list(model.parameters()))
    apply_remat(model, policy=parse_remat(policy))
    blocks: list[nn.Module] = list(model.blocks)
    for block in blocks:
        fully_shard(block, reshard_after_forward=reshard)
    fully_shard(model, reshard_after_forward=reshard)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ids = torch.randint(0, 256, (4, 33), generator=torch.Generator().manual_seed(dist.get_rank()))
    kept = []  # a thread of gloo may let go of a gathered block a moment late, on a busy machine
    for _ in range(3):
        torch.manual_seed(7)
        with CommunicationCounter() as sent, MemoryTracker(model=model, optimizers=[optimizer]) as watch:
            loss = nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
            loss.backward()
            held = memory_at_rest(model=model, optimizers=[optimizer])
            grads = [p.grad.to_local().clone() for p in model.parameters() if p.grad is not None]
            optimizer.step()
            optimizer.zero_grad()
        kept.append(watch.kept_bytes)
    return {
        "whole": whole,
        "held": held.as_json(),
        "peak": watch.peak.as_json(),
        "kept": min(kept),
        "sent": sent.as_json(),
        "bits": [float(g.double().sum()) for g in grads] + [float(loss.detach())],
    }


def main(rank: int, path: str) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=RANKS)
    found = {"flows": flows()}
    for policy in ("none", "full", "selective"):
        found[policy] = shard(policy, True)
    found["kept whole"] = shard("none", False)
    if rank == 0:
        print(json.dumps(found), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.multiprocessing.spawn(main, (sys.argv[1],), RANKS)
