"""A job that reports the peak memory of each of its processes until its learning-rate schedule is built.

Its weights are much larger than what runs through them. `run` is the same for a process of the tests.
"""

import json
import os
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor, nn

import paceline as pl
from paceline.checkpoint.tensor_bytes import weights_digest
from paceline.comm.process_group import LaunchInfo, World
from paceline.config.task import Task
from paceline.parallel.gradients import partition as divide
from paceline.parallel.sharding import fully_sharded as fsdp
from paceline.parallel.sharding import shardability_check as tried
from paceline.parallel.sharding import sharded_model as sharded
from paceline.profiling.model_tracing.memory_tracker import MemoryTracker, memory_at_rest
from paceline.trainer.setup.build_training_setup import build_training_setup
from paceline.trainer.setup.prepare import prepare

WORDS = 32


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    """`asks`: its forward branches on a number that depends on the weights, inside a block."""

    def __init__(self, width: int, depth: int, *, asks: bool = False) -> None:
        super().__init__()
        self.word = nn.Embedding(WORDS, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, WORDS)
        self.register_buffer("scale", torch.ones(1), persistent=False)
        self.asks = asks

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.word(tokens) * self.scale
        for block in self.blocks:
            x = block(x)
        if self.asks and float(x.detach().abs().sum()) < 0:
            x = -x
        found: Tensor = self.head(x)
        return found


def loss(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    total = nn.functional.cross_entropy(output.flatten(0, 1), batch[1].flatten(), reduction="sum")
    return total, batch[1].numel()


class Data(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        tokens = torch.arange(index, index + 4) % WORDS
        return tokens, tokens


def make_job(width: int = 64, depth: int = 8, asks: bool = False, answer: str = "") -> pl.Job:
    def model() -> nn.Module:
        forget_high_water()
        return Net(width, depth, asks=asks)

    def schedule(optimizer: torch.optim.Optimizer) -> Any:
        if answer:
            tell(answer)
        return torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)

    return pl.Job(
        model=model,
        loss=loss,
        train_data=Data(),
        optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
        lr_schedule=schedule,
        global_batch_size=4,
    )


STATUS = Path("/proc/self/status")
BEFORE = [0]


def forget_high_water() -> None:
    """Resident memory is counted from the first time that the model is built."""
    if not BEFORE[0]:
        Path("/proc/self/clear_refs").write_text("5")
        BEFORE[0] = psutil.Process().memory_info().rss


def tell(answer: str) -> None:
    told = {"most": METER.peak.total, "resident": METER.resident} if METER is not None else {}
    Path(f"{answer}-{os.environ['RANK']}.json").write_text(json.dumps(told))


class Meter(MemoryTracker):
    """The most bytes of tensors from here until gradients are given their memory, and of the process's memory."""

    def __init__(self) -> None:
        super().__init__(model=nn.Module())
        self.is_on, self.resident = True, 0
        tried._LARGE_SHAPES = ()  # an update rule is tried on tensors of a fixed size, larger than this model's
        for module, name in ((fsdp, "ScatterReducer"), (sharded, "_build_reducer"), (divide, "build_reducer")):
            setattr(module, name, self._ending(PLAIN.setdefault(name, getattr(module, name))))
        self.__enter__()

    def _ending(self, plain: Any) -> Any:
        def reducer(*args: Any, **kwargs: Any) -> Any:
            if self.is_on:
                self.is_on = False
                high = next(line for line in STATUS.read_text().splitlines() if line.startswith("VmHWM"))
                self.resident = int(high.split()[1]) * 1024 - BEFORE[0]
                self.__exit__(None, None, None)
            return plain(*args, **kwargs)

        return reducer


PLAIN: dict[str, Any] = {}
METER = (
    Meter() if __name__ != "tests.parallel.initialization.peak_memory_job" and "RANK" in os.environ else None
)  # loaded by a rank, as a job


def run(payload: dict[str, Any]) -> int:
    """One rank: for each layout the most bytes while it was built, those that it holds, and the digest of the whole."""
    torch.set_num_threads(1)
    world = World.join(launch_info=LaunchInfo.read(os.environ), device_type="cpu", backend="gloo", timeout_seconds=60)
    told = {}
    for layout in payload["layouts"]:
        task = Task(
            verb="verify",
            job=str(Path(__file__)),
            layout=layout,
            ranks=world.world_size,
            settings={"init.limit": payload["limit"], "train.micro_batch_size": 1},
        )
        ready = prepare(task, job=make_job(asks=layout in payload.get("asks", ())))
        meter = Meter()
        built = build_training_setup(job=ready.job, settings=ready.settings, plan=ready.plan, world=world)
        held = memory_at_rest(model=built.model)
        wholes = dict(
            built.weights.gather_full_tensors({name: one.tensor for name, one in built.weights.local_tensors.items()})
        )
        told[layout] = {
            "most": meter.peak.total,
            "held": held.total,
            "digest": weights_digest(sorted(wholes.items())),
            "notes": list(built.notes),
        }
        built.close()
        del built
    Path(payload["answer"] + str(world.rank)).write_text(json.dumps(told))
    world.close()
    return 0
