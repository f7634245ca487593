"""Real gloo processes that train a model under a sharded layout by hand, compared with plain torch.

`run` starts the ranks once and lets them do several cases; each answers with the parts of the weights and gradients
that it holds, which are put together here and compared with one process's.
"""

import importlib
import math
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from paceline.comm.process_group import World
from paceline.parallel.data_parallel.exact_reduction import ExactReducer, FixedPointGrid
from paceline.parallel.data_parallel.reducer import LocalReducer
from paceline.parallel.gradients.joint_grad_norm import joint_norm
from paceline.parallel.module_access import parameters as units
from paceline.parallel.module_access.parameters import trainable_parameters
from paceline.parallel.module_access.shard_spec import ShardSpec
from paceline.parallel.sharding.fsdp_options import FullShardOptions
from paceline.parallel.sharding.fully_sharded import shard_zero3
from paceline.parallel.sharding.sharded_model import DataGroups, ShardedModel, shard_zero12
from paceline.parallel.sharding.zero_sharded_optimizer import try_optimizer_factory

CLIP = 0.5


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(3 * width, width)
        self.mix = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        causal = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        scores = (self.mix(x) @ x.mT / math.sqrt(x.shape[-1])).masked_fill(~causal, -math.inf)
        x = x + scores.softmax(-1) @ x
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Gpt(nn.Module):
    """Tied, with a frozen parameter, one that nobody uses, one that some batches use, a scalar and a single row."""

    def __init__(self, width: int = 6, vocabulary: int = 11, blocks: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.places = nn.Parameter(torch.randn(5, width) * 0.1, requires_grad=False)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.remat = False
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.tensor(1.3))
        self.row = nn.Parameter(torch.randn(1, width))
        self.unused = nn.Parameter(torch.randn(3, 2))
        self.sometimes = nn.Parameter(torch.randn(width))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.places[: ids.shape[1]] + self.row
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.remat else block(x)
        if int(ids[0, 0]) % 2:
            x = x * self.sometimes
        return self.head(self.norm(x)) * self.scale


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=11,
            hidden_size=12,
            intermediate_size=20,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=16,
            use_cache=False,
            tie_word_embeddings=True,
        )
    )


MODELS: dict[str, Callable[[], nn.Module]] = {"gpt": Gpt, "llama": llama}


def adamw(pairs: Any) -> Any:
    decay = [(n, p) for n, p in pairs if p.dim() > 1]
    rest = [(n, p) for n, p in pairs if p.dim() <= 1]
    return torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.1, "lr": 3e-2}, {"params": rest, "weight_decay": 0.0}], lr=1e-2
    )


def momentum(pairs: Any) -> Any:
    return torch.optim.SGD([p for _, p in pairs], lr=0.05, momentum=0.9, nesterov=True)


def adagrad(pairs: Any) -> Any:
    return torch.optim.Adagrad([{"params": [p for _, p in pairs]}], lr=0.05, initial_accumulator_value=0.1)


def muon(pairs: Any) -> Any:
    inner = [p for n, p in pairs if p.dim() == 2 and "blocks" in n]
    seen = {id(p) for p in inner}
    rest = [p for _, p in pairs if id(p) not in seen]
    return [torch.optim.Muon(inner, lr=0.02), torch.optim.AdamW(rest, lr=1e-2)]


def fused(pairs: Any) -> Any:
    return torch.optim.AdamW([p for _, p in pairs], lr=1e-2, fused=True)


def adafactor(pairs: Any) -> Any:
    """torch's own divides by how many elements a tensor has."""
    return torch.optim.Adafactor([p for _, p in pairs], lr=1e-2)


OPTIMIZERS = {
    "adamw": adamw,
    "adafactor": adafactor,
    "momentum": momentum,
    "adagrad": adagrad,
    "muon": muon,
    "fused": fused,
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One training. `layout` is zero1, zero2, fsdp or single; the ranks form `replicate` groups of shards."""

    layout: str
    model: str = "gpt"
    optimizer: str = "adamw"
    exact: bool = False
    replicate: int = 1
    steps: int = 4
    micro: int = 5
    asked: FullShardOptions = field(default_factory=FullShardOptions)
    fault: str = ""
    offload_state: bool = False
    autocast: bool = False
    remat: bool = False

    def __str__(self) -> str:
        words = [self.layout, self.model, self.optimizer, "exact" if self.exact else "", self.fault]
        words += [name for name in ("autocast", "remat", "offload_state") if getattr(self, name)]
        words += [
            "" if self.asked == FullShardOptions() else "asked",
            f"x{self.replicate}" if self.replicate > 1 else "",
        ]
        return "-".join(word for word in words if word)


def build(case: Case) -> nn.Module:
    torch.manual_seed(3)
    model = MODELS[case.model]()
    if case.remat:
        model.remat = True
    return model if case.exact else model.double()


def batches(case: Case) -> list[list[Tensor]]:
    """For each step its microbatches, of other sizes and lengths; the last step has one."""
    generator = torch.Generator().manual_seed(7)
    steps = []
    for step in range(case.steps):
        num = 1 if step == case.steps - 1 else case.micro
        steps.append([torch.randint(0, 11, (1 + j % 3, 5 - j % 2), generator=generator) for j in range(num)])
    return steps


def loss_of(model: nn.Module, ids: Tensor) -> tuple[Tensor, int]:
    out = model(ids)
    logits = out if isinstance(out, Tensor) else out.logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="sum"), ids[:, 1:].numel()


def plain(case: Case) -> dict[str, dict[str, Tensor]]:
    """Plain torch in one process: the whole batch, torch's own clipping."""
    model = build(case)
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    made = OPTIMIZERS[case.optimizer](named)
    optimizers = made if isinstance(made, list) else [made]
    gradients: dict[str, Tensor] = {}
    norms = []
    for micro in batches(case):
        model.zero_grad()
        count = 0
        for ids in micro:
            total, own = loss_of(model, ids)
            total.backward()
            count += own
        for parameter in (p for _, p in named if p.grad is not None):
            parameter.grad /= count
        norms.append(nn.utils.clip_grad_norm_([p for _, p in named], CLIP).detach())
        gradients = {n: p.grad.clone() for n, p in named if p.grad is not None}
        for optimizer in optimizers:
            optimizer.step()
    weights = {n: p.detach() for n, p in model.named_parameters()}
    return {"weights": weights, "gradients": gradients, "norms": {"all": torch.stack(norms)}}


def place(
    case: Case, model: nn.Module, data: DataGroups, grid: FixedPointGrid | None
) -> tuple[ShardedModel, list[Any]]:
    named = trainable_parameters(model)
    rules = try_optimizer_factory(OPTIMIZERS[case.optimizer], named)
    if case.layout == "fsdp":
        rules.refuse_rows(layout="fsdp", exact=case.exact)
        sharded = shard_zero3(model, named_parameters=named, data_groups=data, grid=grid, options=case.asked)
    else:
        whole = list(rules.full_tensor_reasons(exact=case.exact))
        stage = int(case.layout.removeprefix("zero"))
        sharded = shard_zero12(
            stage=stage, model=model, named_parameters=named, data_groups=data, grid=grid, full_tensor_names=whole
        )
    return sharded, rules.make_optimizers(sharded.row_shards)


def alone(case: Case) -> dict[str, dict[str, Tensor]]:
    """The package's own one process: the reducer of `single`, for the bits."""
    model = build(case)
    named = trainable_parameters(model)
    grid = FixedPointGrid(names=[member.name for member in named]) if case.exact else None
    reducer: Any = (
        ExactReducer(named_parameters=named, world=World.alone(), grid=grid)
        if grid
        else LocalReducer(named_parameters=named)
    )
    made = OPTIMIZERS[case.optimizer]([(m.name, m.parameter) for m in named])
    optimizers = made if isinstance(made, list) else [made]
    pairs = [(m.name, m.parameter) for m in named]
    norms = _loop(case, model, pairs, optimizers, reducer, 0, 1, (), lambda: None, meets=False)
    gradients = {n: p.grad for n, p in pairs if p.grad is not None}
    weights = {n: p.detach() for n, p in model.named_parameters()}
    return {"weights": weights, "gradients": gradients, "norms": {"all": norms}}


def _loop(
    case: Case,
    model: nn.Module,
    pairs: Sequence[tuple[str, nn.Parameter]],
    optimizers: Sequence[Any],
    reducer: Any,
    replica: int,
    replicas: int,
    worlds: Sequence[World],
    spread: Callable[[], None],
    *,
    meets: bool,
) -> Tensor:
    norms = []
    for micro in batches(case):
        own = [ids for j, ids in enumerate(micro) if j % replicas == replica]
        rounds = -(-len(micro) // replicas) if meets else len(own)
        count = sum(ids[:, 1:].numel() for ids in micro)
        for _ in range(4):
            reducer.begin()
            for number in range(rounds):
                _microbatch(case, model, reducer, own, micro, number, rounds)
            if reducer.finish(divisor=float(count)):
                break
        else:
            raise AssertionError("no grid")
        over = () if case.fault == "norm of own rows" else worlds
        norm = joint_norm([p.grad for _, p in pairs if p.grad is not None], worlds=over, exact=case.exact)
        norms.append(norm)
        nn.utils.clip_grads_with_norm_([p for _, p in pairs], CLIP, norm)
        for optimizer in optimizers:
            optimizer.step()
        spread()
    return torch.stack(norms)


def _microbatch(
    case: Case, model: nn.Module, reducer: Any, own: list[Tensor], micro: list[Tensor], number: int, rounds: int
) -> None:
    counts = number < len(own)
    with torch.autocast("cpu", torch.bfloat16, enabled=case.autocast):
        total, _ = loss_of(model, own[number] if counts else micro[0])
    if counts:
        reducer.before_backward(last=number == len(own) - 1)
    else:
        reducer.before_backward(last=True, has_samples=case.fault == "a stand-in counts")
    total.backward()
    reducer.after_backward()
    if case.layout in ("zero2", "fsdp"):
        assert all(p.grad is None for p in model.parameters()), "a whole gradient stays after its microbatch"


def worlds_of(rank: int, size: int, replicate: int) -> DataGroups:
    every = World(rank=rank, world_size=size, backend="gloo", group=dist.group.WORLD)
    if replicate == 1:
        return DataGroups(all_ranks=every, shard_world=every)
    each = size // replicate
    rows = [list(range(r * each, (r + 1) * each)) for r in range(replicate)]
    columns = [list(range(c, size, each)) for c in range(each)]
    groups = {tuple(ranks): dist.new_group(ranks) for ranks in [*rows, *columns]}

    def world(ranks: list[int]) -> World:
        if len(ranks) == 1:
            return World.alone()
        return World(rank=ranks.index(rank), world_size=len(ranks), backend="gloo", group=groups[tuple(ranks)])

    return DataGroups(all_ranks=every, shard_world=world(rows[rank // each]), replica_world=world(columns[rank % each]))


def train(case: Case, rank: int, size: int) -> dict[str, Any]:
    """One rank's part of it."""
    data = worlds_of(rank, size, case.replicate)
    model = build(case)
    grid = FixedPointGrid(names=[member.name for member in trainable_parameters(model)]) if case.exact else None
    sharded, optimizers = place(case, model, data, grid)
    _plant(case, sharded, rank)
    if case.offload_state:
        from paceline.parallel.sharding.optimizer_offload import offload_state

        for optimizer in optimizers:
            offload_state(optimizer)
    where = {name: tensor.data_ptr() for name, tensor in sharded.local_tensors.items()}
    pairs = [(s.name, s.parameter) for s in sharded.row_shards]
    norms = _loop(
        case,
        model,
        pairs,
        optimizers,
        sharded.reducer,
        rank,
        size,
        (data.shard_world,),
        sharded.sync_after_update,
        meets=sharded.needs_equal_microbatches,
    )
    now = {n: p.to_local() if hasattr(p, "to_local") else p for n, p in model.named_parameters()}
    assert {n: t.data_ptr() for n, t in now.items()} == where, "the storage has moved"
    return {
        "weights": [(n, sharded.shard_specs[n].as_json(), t.detach()) for n, t in now.items()],
        "gradients": [(s.name, s.shard_spec.as_json(), s.parameter.grad) for s in sharded.row_shards],
        "norms": norms,
        "bytes": held(model, sharded, optimizers),
        "meets": sharded.needs_equal_microbatches,
    }


def _plant(case: Case, sharded: ShardedModel, rank: int) -> None:
    """A mistake, where people make it."""
    reducer: Any = sharded.reducer
    if case.fault == "not spread":
        getattr(sharded.sync_after_update, "_all_gather_scalars", sharded.sync_after_update)._layouts.clear()
    if case.fault == "replicas not added":
        reducer._replica_world = None
    if case.fault == "rows left out" and rank == 0:
        reducer._buckets[0].member_sums[0] = torch.zeros_like(reducer._buckets[0].member_sums[0])
    if case.fault == "only the last microbatch":
        land = reducer._launch_next

        def forgetful() -> None:
            rounds, reducer._num_backwards = reducer._num_backwards, 0
            land()
            reducer._num_backwards = rounds

        reducer._launch_next = forgetful


def held(model: nn.Module, sharded: ShardedModel, optimizers: Sequence[Any]) -> dict[str, int]:
    """Bytes of the storages that are alive: parameters, gradients, optimizer state."""

    def total(tensors: list[Tensor]) -> int:
        storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
        return sum(storages.values())

    locals_ = [p.to_local() if hasattr(p, "to_local") else p for p in model.parameters()]
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    gradients += [s.parameter.grad for s in sharded.row_shards if s.parameter.grad is not None]
    state = [
        v for o in optimizers for s in o.state.values() for k, v in s.items() if isinstance(v, Tensor) and k != "step"
    ]
    return {
        "parameters": total([t.detach() for t in locals_] + [s.parameter.detach() for s in sharded.row_shards]),
        "gradients": total([g.to_local() if hasattr(g, "to_local") else g for g in gradients]),
        "optimizer": total(state),
    }


def together(pieces: Sequence[Sequence[tuple[str, Any, Tensor | None]]]) -> dict[str, Tensor]:
    """Whole tensors from every rank's parts."""
    whole: dict[str, Tensor] = {}
    for piece in pieces:
        for name, json, tensor in piece:
            part = ShardSpec.from_json(json)
            if tensor is not None:
                target = whole.setdefault(name, torch.full(part.shape, math.nan, dtype=tensor.dtype))
                part.write_into(tensor, full_tensor=target)
    return whole


def _rank(rank: int, size: int, folder: Path) -> None:
    torch.set_num_threads(1)
    work, cases = torch.load(folder / "asked.pt", weights_only=False)
    store = dist.FileStore(str(folder / "store"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    found = []
    for case in cases:
        try:
            found.append(work(case, rank, size))
        except Exception as error:
            found.append({"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()})
    torch.save(found, folder / f"rank-{rank}.pt")
    dist.destroy_process_group()


def train_in_small_buckets(case: Case, rank: int, size: int) -> dict[str, Any]:
    """As `train`, where every parameter of more than 200 bytes travels alone and the others in buckets of 100."""
    units.LARGE_PARAMETER_BYTES, units.FIRST_BUCKET_BYTES, units.TRANSIENT_BUCKET_BYTES = 200, 64, 100
    return train(case, rank, size)


def run(cases: Sequence[Any], *, ranks: int, folder: Path, work: Callable[..., Any] | None = None) -> list[list[Any]]:
    """For each case every rank's answer."""
    me = importlib.import_module(
        "tests.parallel.sharding.sharding_ranks"
    )  # a rank finds the same functions by this name
    torch.save((work or me.train, list(cases)), folder / "asked.pt")
    command = [sys.executable, "-W", "error", "-m", "tests.parallel.sharding.sharding_ranks", str(folder), str(ranks)]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    with subprocess.Popen(command, cwd=Path(__file__).parents[3], env=environ, start_new_session=True) as process:
        try:
            code = process.wait(timeout=200)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    assert code == 0
    answers = [torch.load(folder / f"rank-{rank}.pt", weights_only=False) for rank in range(ranks)]
    return [list(case) for case in zip(*answers, strict=True)]


def _ranks(folder: Path, size: int) -> int:
    """All of them, forked from one process that has torch; how the first that failed ended."""
    pids = []
    for rank in range(size):
        pid = os.fork()
        if pid == 0:
            try:
                _rank(rank, size, folder)
                os._exit(0)
            except BaseException:
                traceback.print_exc()
            os._exit(1)
        pids.append(pid)
    return next((code for code in [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids] if code), 0)


if __name__ == "__main__":
    sys.exit(_ranks(Path(sys.argv[1]), int(sys.argv[2])))
