"""One rank of the tests of initial weights: it builds its shards and reports its peak memory."""

import json
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from paceline.comm.process_group import LaunchInfo, World
from paceline.errors import DesyncError
from paceline.parallel.initialization.deferred_init import defer_init
from paceline.parallel.initialization.meta_model import named_tensors
from paceline.parallel.module_access.shard_spec import ShardSpec, ShardSpecs, shard_rows
from paceline.torch_internals.dispatch_modes import TorchDispatchMode
from paceline.torch_internals.rng import seed_all, stream_key
from tests.zoo import JOBS

SEED = 7


class Drawn(nn.Module):
    """A number that is no tensor comes from a draw: without memory it is another."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.rate = torch.rand(1).item()
        self.last = nn.Linear(16, 16)


class Uneven(nn.Module):
    """Another processor draws other bits: played on the ranks from 2 on."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 16)
        with torch.no_grad():
            self.last.weight.add_(float(int(os.environ.get("RANK", 0)) // 2))


class Meter(TorchDispatchMode):
    """The most bytes that tensors have held at once while it was on."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for tensor in found if isinstance(found, tuple | list) else [found]:
            if isinstance(tensor, Tensor) and tensor.untyped_storage().device.type != "meta":
                self._count(tensor.untyped_storage())
        return found

    def _count(self, storage: torch.UntypedStorage) -> None:
        number, size = storage._cdata, storage.nbytes()
        if number in self._seen:
            return
        self._seen.add(number)
        self.now += size
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._gone, number, size)

    def _gone(self, number: int, size: int) -> None:
        self._seen.discard(number)
        self.now -= size


MODELS: dict[str, Callable[[], nn.Module]] = {
    **{name: (lambda make=make: make().model()) for name, make in JOBS.items()},
    "drawn": Drawn,
    "uneven": Uneven,
}


def plain(name: str) -> nn.Module:
    """As one process builds it."""
    seed_all(stream_key(SEED, "build"))
    return MODELS[name]()


def split(model: nn.Module, *, rank: int, ranks: int) -> ShardSpecs:
    """Rows over ranks; every third tensor is one rank's alone; buffers are everybody's."""
    found = {}
    for place, (name, tensor) in enumerate(named_tensors(model).items()):
        whole = ShardSpec.full(tensor.shape)
        if not isinstance(tensor, nn.Parameter):
            found[name] = whole
        elif place % 3 == 2:
            found[name] = whole if place % ranks == rank else ShardSpec.empty(tensor.shape)
        else:
            found[name] = shard_rows(whole, shard_rank=rank, num_shards=ranks)
    return found


def _refused(world: World) -> list[str]:
    """What is said where a rank's model is another: below and above the limit."""
    found = []
    for limit in (1 << 40, 8):
        try:
            defer_init(lambda: nn.Linear(4, 4, bias=world.rank != 1), seed=SEED, world=world, limit_bytes=limit)
        except DesyncError as error:
            found.append(error.what)
    return found


def run(payload: dict[str, Any]) -> int:
    """Each job in turn."""
    torch.set_num_threads(1)
    place = LaunchInfo.read(os.environ)
    if payload.get("nodes"):
        place = LaunchInfo(**{**vars(place), "local_rank": place.rank % payload["nodes"]})
    world = World.join(launch_info=place, device_type="cpu", backend="gloo", timeout_seconds=60)
    told: dict[str, Any] = {}
    for limit in payload["limits"]:
        for job in payload["jobs"]:
            with Meter() as meter:
                made = defer_init(lambda job=job: plain(job), seed=SEED, world=world, limit_bytes=limit)
                parts = split(made.model, rank=world.rank, ranks=world.world_size)
                values, _ = made.values(parts)
            told[f"{job}-{limit}"] = {
                "most": meter.most,
                "notes": made.notes,
                "rate": getattr(made.model, "rate", None),
                "parts": {name: part.as_json() for name, part in parts.items()},
            }
            kept = {name: value.contiguous() for name, value in values.items()}
            save_file(kept, f"{payload['answer']}{job}-{limit}-{world.rank}")
    told["other"] = _refused(world)
    Path(f"{payload['answer']}{world.rank}.json").write_text(json.dumps(told))
    world.close()
    return 0
