"""Accumulation by hand: DDP, `no_sync`, and one reduction a step, however many microbatches a rank has.

    torchrun --standalone --nproc-per-node 2 examples/by_hand/accumulate.py [--save WEIGHTS.pt]

Three mistakes are common in such loops. A loop with one of them still trains, but not as well or not as fast:
- A loop without `no_sync`. DDP then sends every gradient in every backward. With `no_sync`, only the last backward
  sends the sums. A rank without microbatches still runs one microbatch, with weight zero. Otherwise the other ranks
  would wait for its gradients forever.
- The mean over ranks, which DDP computes. Here the sum is needed, so the loss is multiplied by the number of ranks.
- A mean of means, such as `loss.mean() / ACCUMULATE`. Here sums are added, and divided once, by the global count.

Messages: every gradient once a step, and one count. Memory: as under DDP. Waiting: communication overlaps only with the
last backward.
"""

import os
import sys
from contextlib import nullcontext

import torch
import torch.distributed as dist
from single import GLOBAL_BATCH, MICRO_BATCH, STEPS, loss_sum, make_data, make_model, make_optimizer, save
from torch.nn.parallel import DistributedDataParallel


def train(rank: int, ranks: int) -> torch.nn.Module:
    model = DistributedDataParallel(make_model())
    optimizer = make_optimizer(model.parameters())
    x, y = make_data()
    for step in range(STEPS):
        optimizer.zero_grad()
        count = torch.zeros(())
        starts = range(step * GLOBAL_BATCH, (step + 1) * GLOBAL_BATCH, MICRO_BATCH)
        own = list(starts)[rank::ranks]  # microbatch j belongs to rank j % ranks
        for number, at in enumerate(own or [starts[0]], 1):
            last = number == max(len(own), 1)
            with nullcontext() if last else model.no_sync():
                loss, counted = loss_sum(model, x[at : at + MICRO_BATCH], y[at : at + MICRO_BATCH])
                weight = 1.0 if own else 0.0  # a rank without a microbatch takes part and adds nothing
                (loss * ranks * weight).backward()  # DDP takes the mean over ranks; this makes it the sum
            count += counted * weight
        dist.all_reduce(count)
        for parameter in model.parameters():
            parameter.grad.div_(count)
        optimizer.step()
    return model.module


if __name__ == "__main__":
    dist.init_process_group("gloo")
    model = train(dist.get_rank(), dist.get_world_size())
    if dist.get_rank() == 0:
        save(model, sys.argv)
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # gloo's threads may outlive the interpreter
