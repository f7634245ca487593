"""Plain training loops, each recorded twice: by two ranks, whose batches are kept, and by one process that gets them.

`main` runs the loops named in `sys.argv[2:]` one after another, each in forked processes, and records them into
`NAME/many` and `NAME/one` in the folder `sys.argv[1]`. Those of `UNRECORDED` are also run by two ranks without a
recorder. The digest of the last weights of each run is in `NAME/digest-RUN-RANK`.
"""

import hashlib
import os
import sys
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # DistributedDataParallel imports it, for a second in each process
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from paceline.script_check.recorder.script_recorder import start_recorder
from paceline.script_check.recording import (
    FEED_VARIABLE,
    FOLDER_VARIABLE,
    KEEP_VARIABLE,
    STEPS_VARIABLE,
    ScriptRecording,
    write_origin,
)

BATCH, CLASSES, LENGTH, SAMPLES = 8, 5, 6, 51
IGNORED = -100
UNRECORDED = ("a data loader", "the loss in the model")
INSIDE = ("in the model", "without a loader")


class Tagger(nn.Module):
    """A model that gives each token of a sequence a class; with `targets`, it returns its loss too."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1 * (kind == "dropout"), batch_first=True)
        self.norm = nn.BatchNorm1d(LENGTH) if kind == "batch norm" else nn.Identity()
        self.last = nn.Linear(16, CLASSES)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Any:
        output = self.last(self.norm(self.layer(self.embed(tokens))))
        return output if targets is None else (output, loss_of(output, targets))


def loss_of(output: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)


def make_data(kind: str) -> TensorDataset:
    torch.manual_seed(0)
    count = SAMPLES + (kind == "an even end")
    tokens, targets = torch.randint(20, (count, LENGTH)), torch.randint(CLASSES, (count, LENGTH))
    if kind == "a mean of means":
        targets[torch.rand(SAMPLES, LENGTH) < 0.5] = IGNORED
    return TensorDataset(tokens, targets)


def batches(kind: str, world_size: int, rank: int, size: int) -> Any:
    data = make_data(kind)
    if any(word in kind for word in INSIDE):
        torch.manual_seed(1 + rank)
        for _ in range(8):
            yield data[torch.randint(SAMPLES, (size,))]
        return
    has_short_end = "end" in kind
    sampler = DistributedSampler(data, world_size, rank, shuffle=True)
    yield from DataLoader(data, size, sampler=sampler, drop_last=not has_short_end)


def train(kind: str) -> str:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    is_many = world_size > 1
    torch.manual_seed(7 if kind == "another start" and is_many else 3)
    model: nn.Module = Tagger(kind)
    if kind == "fsdp":
        fully_shard(model.layer)
        fully_shard(model)
    else:
        model = DistributedDataParallel(model)
    rate = 1e-2 * (world_size if kind == "a scaled learning rate" else 1)
    decay = 0.05 if kind == "another weight decay" and is_many else 0.1
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=decay)
    passes = 2 if "accumulation" in kind and (is_many or kind != "accumulation in one alone") else 1
    if kind in ("a window that is cut", "two losses"):
        passes = 2 if is_many else 1
    if kind == "accumulation in one alone":
        passes = 1 if is_many else 2
    size = BATCH // world_size if kind != "batches of the same size" else BATCH // 2
    size //= 2 if kind == "accumulation in one alone" and not is_many else 1
    for number, (tokens, targets) in enumerate(batches(kind, world_size, rank, size)):
        is_last = (number + 1) % passes == 0
        with model.no_sync() if not is_last else nullcontext(), torch.autocast("cpu", enabled=kind == "autocast"):
            if "in the model" in kind:
                loss = model(tokens, targets=targets)[1]
            else:
                loss = loss_of(model(tokens), targets)
        loss = loss / (1 if kind == "accumulation not divided" and is_many else passes)
        (loss * (world_size if kind == "a loss times the ranks" else 1)).backward()
        if is_last:
            if kind == "clipped":
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
    digest = hashlib.sha256()
    for p in model.parameters():
        digest.update((p.full_tensor() if hasattr(p, "full_tensor") else p).detach().numpy().tobytes())
    return digest.hexdigest()


def run_loop(kind: str, folder: Path, *, name: str) -> None:
    """Train in a process of its own, because the recorder has hooks on all modules and optimizers."""
    world_size = 1 if name == "one" else 2
    if name != "plain":
        write_origin(folder / name, ScriptRecording(command=(name,), steps=0, fed="" if name == "many" else "many"))
        exchange = {KEEP_VARIABLE: "1"} if name == "many" else {FEED_VARIABLE: str(folder / "many")}
        start_recorder({**os.environ, FOLDER_VARIABLE: str(folder / name), STEPS_VARIABLE: "0", **exchange})
    rank = int(os.environ["RANK"])
    store = dist.FileStore(str(folder / f"store-{name}"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=60))
    (folder / f"digest-{name}-{rank}").write_text(train(kind))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    torch.set_num_threads(1)
    for kind in sys.argv[2:]:
        for name in ("many", "one", *(["plain"] if kind in UNRECORDED else [])):
            if os.environ["RANK"] == "0" or name != "one":
                pid = os.fork()
                if pid == 0:
                    folder = Path(sys.argv[1]) / kind
                    folder.mkdir(parents=True, exist_ok=True)
                    run_loop(kind, folder, name=name)
                    os._exit(0)  # an end by Python takes longer than the loop
                assert os.waitpid(pid, 0)[1] == 0, (kind, name)
