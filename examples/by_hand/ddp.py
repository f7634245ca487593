"""Data parallelism by hand: each rank computes its microbatches, and every gradient is all-reduced and divided once.

    torchrun --standalone --nproc-per-node 3 examples/by_hand/ddp.py [--save WEIGHTS.pt]

Messages: every gradient once a step, and one count. Memory: as in one process. Waiting: for every all-reduce, one
after another, after backward. Paceline sends the gradients while backward runs.
"""

import os
import sys

import torch
import torch.distributed as dist
from single import GLOBAL_BATCH, MICRO_BATCH, STEPS, loss_sum, make_data, make_model, make_optimizer, save


def train(rank: int, ranks: int) -> torch.nn.Module:
    model = make_model()  # the same seed on every rank, so the same initial weights
    optimizer = make_optimizer(model.parameters())
    x, y = make_data()
    for step in range(STEPS):
        optimizer.zero_grad()
        count = torch.zeros(())
        starts = range(step * GLOBAL_BATCH, (step + 1) * GLOBAL_BATCH, MICRO_BATCH)
        for at in list(starts)[rank::ranks]:  # microbatch j belongs to rank j % ranks
            loss, counted = loss_sum(model, x[at : at + MICRO_BATCH], y[at : at + MICRO_BATCH])
            loss.backward()
            count += counted
        dist.all_reduce(count)
        for parameter in model.parameters():
            if parameter.grad is None:  # a rank without a microbatch takes part with zeros
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad)  # a sum, not an average
            parameter.grad.div_(count)
        optimizer.step()
    return model


if __name__ == "__main__":
    dist.init_process_group("gloo")
    model = train(dist.get_rank(), dist.get_world_size())
    if dist.get_rank() == 0:
        save(model, sys.argv)
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # gloo's threads may outlive the interpreter
