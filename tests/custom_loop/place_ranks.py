"""One rank of the tests of `pl.place`: it trains as a script would, next to plain torch on all samples."""

import atexit
import contextlib
import copy
import json
import os
import sys
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import paceline as pl
from paceline.errors import PacelineError
from paceline.trainer.setup import initial_model as begin

STEPS = 4
FOLDER = Path(sys.argv[1]) if len(sys.argv) > 1 else Path()


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Blocks, a tied weight, a scalar, a parameter that nobody uses, a buffer that is not saved."""

    def __init__(self, inputs: int = 6, outputs: int = 3, width: int = 8) -> None:
        super().__init__()
        self.enter = nn.Linear(inputs, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.first, self.again = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.again.weight = self.first.weight
        self.leave = nn.Linear(width, outputs)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.unused = nn.Parameter(torch.randn(3, 2))
        self.register_buffer("shift", torch.randn(width), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x) + self.shift
        for block in self.blocks:
            x = block(x)
        return self.leave(self.again(torch.tanh(self.first(x)))) * self.scale


def batches(rows: int = 8, width: int = 6) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    for _ in range(STEPS):
        yield torch.randn(rows, width, generator=generator), torch.randint(0, 3, (rows,), generator=generator)


def adam(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    decays = [p for _, p in named if p.dim() > 1]
    return torch.optim.AdamW(
        [{"params": decays}, {"params": [p for _, p in named if p.dim() < 2], "lr": 0.02}], lr=0.01
    )


def sgd(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named], lr=0.05, momentum=0.9)


UNEVEN = {1: (), 2: (3,), 4: (3, 4, 6)}


def mine(placed: Any, x: Tensor, *, uneven: bool = False) -> Tensor:
    """This replica's samples, equally many for each or not."""
    parts = x.tensor_split(UNEVEN[placed.replicas]) if uneven else x.chunk(placed.replicas)
    return parts[placed.replica]


def apart(found: Any, right: nn.Module) -> float:
    tensors = {**dict(right.named_parameters()), **dict(right.named_buffers())}
    assert set(found) == set(tensors)
    return max(float((found[name].double() - value.detach().double()).abs().max()) for name, value in tensors.items())


def made(layout: str | None, build: Callable[[], nn.Module] = Net, **more: Any) -> tuple[Any, nn.Module]:
    """Placed, and the same in plain torch; ranks draw differently, so that rank 0's weights must reach all."""
    torch.manual_seed(int(os.environ["RANK"]))
    if "tp" in (layout or ""):
        more["example"] = lambda model: model(torch.ones(2, model.enter.in_features))
    placed = pl.place(build, layout=layout, **more)
    torch.manual_seed(0)
    return placed, build()


def plain_loop(layout: str) -> dict[str, Any]:
    """Mean loss, clipped; the norms too."""
    placed, right = made(layout)
    ours, theirs = placed.optimizer(adam), adam(list(right.named_parameters()))
    norms = []
    for x, y in batches():
        placed.backward(F.cross_entropy(placed.model(mine(placed, x)), mine(placed, y)), last=True)
        norm = placed.clip(0.3)
        ours.step()
        theirs.zero_grad()
        F.cross_entropy(right(x), y).backward()
        norms.append(abs(float(norm) - float(nn.utils.clip_grad_norm_(right.parameters(), 0.3))))
        theirs.step()
    return {"apart": apart(placed.whole(), right), "norm": max(norms)}


def counted_loop(layout: str) -> dict[str, Any]:
    """Sums and counts, unequal over ranks, two forwards in two backwards, a schedule."""
    placed, right = made(layout)
    ours, theirs = placed.optimizer(sgd), sgd(list(right.named_parameters()))
    schedules = [torch.optim.lr_scheduler.ExponentialLR(o, 0.8) for o in (ours, theirs)]
    for x, y in batches():
        own, target = mine(placed, x, uneven=True), mine(placed, y, uneven=True)
        for part in (slice(0, 2), slice(2, None)):
            out = placed.model(own[part])
            placed.backward(F.cross_entropy(out, target[part], reduction="sum"), count=len(out))
        ours.step()
        theirs.zero_grad()
        F.cross_entropy(right(x), y).backward()
        theirs.step()
        for schedule in schedules:
            schedule.step()
    return {"apart": apart(placed.whole(), right)}


def gan(layout: str) -> dict[str, Any]:
    """Two models, two optimizers in turn; the generator's loss goes through the discriminator, which keeps its own."""
    maker, plain_maker = made(layout, lambda: Net(4, 6))
    judge, plain_judge = made(layout, lambda: Net(6, 1))
    ours = maker.optimizer(adam), judge.optimizer(adam)
    theirs = adam(list(plain_maker.named_parameters())), adam(list(plain_judge.named_parameters()))
    for (real, _), (noise, _) in zip(batches(), batches(width=4), strict=True):
        own, z = mine(judge, real), mine(maker, noise)
        fake = maker.model(z)
        right = judge.model(own), judge.model(fake.detach())
        judge.backward(F.softplus(-right[0]).mean() + F.softplus(right[1]).mean())
        ours[1].step()
        maker.backward(F.softplus(-judge.model(fake)).mean())
        ours[0].step()

        made_up = plain_maker(noise)
        theirs[1].zero_grad()
        (F.softplus(-plain_judge(real)).mean() + F.softplus(plain_judge(made_up.detach())).mean()).backward()
        theirs[1].step()
        theirs[0].zero_grad()
        F.softplus(-plain_judge(made_up)).mean().backward()
        theirs[0].step()
    return {"apart": max(apart(maker.whole(), plain_maker), apart(judge.whole(), plain_judge))}


class Few(nn.Module):
    """Parameters of which a rank holds one element or none."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(6, 2)
        self.shapes = nn.ParameterList(torch.full(shape, 0.7) for shape in ((), (1,), (1, 1), (1, 2), (2,), (4,)))

    def forward(self, x: Tensor) -> Tensor:
        scalar, one, matrix, row, pair, four = self.shapes
        return torch.cat([self.enter(x) * row * pair * scalar * one * matrix, four.sum().expand(len(x), 1)], dim=1)


class Counting(torch.optim.Optimizer):
    """SGD with momentum whose state has numbers of no dimension and of one, and a moment."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                state = self.state[p]
                if not state:
                    state |= {"count": torch.zeros(()), "decay": torch.ones(1), "moment": torch.zeros_like(p)}
                state["count"] += 1
                state["decay"] *= 0.9
                state["moment"].mul_(0.5).add_(p.grad)
                p.add_(state["moment"], alpha=-0.1 * float(state["decay"]) / float(state["count"]))


def counting(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return Counting([p for _, p in named], {})


def numbers(layout: str) -> dict[str, Any]:
    """Files of an optimizer whose numbers look like the moments of what a rank holds."""
    return files(layout, build=Few, make=counting)


def files(layout: str, *, build: Callable[[], nn.Module] = Net, make: Any = adam) -> dict[str, Any]:
    """Saved under this layout, loaded under another, two steps there: as two steps more here."""
    other = {"fsdp": "zero1", "zero1": "ddp", "ddp": "fsdp"}.get(layout, "fsdp")
    one, _ = made(layout, build)
    optimizer = one.optimizer(make)
    steps = list(batches())
    folder = FOLDER / f"saved-{getattr(make, '__name__', '')}-{layout}"

    def train(placed: Any, optimizer: Any, those: Any) -> None:
        for x, y in those:
            placed.backward(F.cross_entropy(placed.model(mine(placed, x)), mine(placed, y)))
            optimizer.step()

    train(one, optimizer, steps[:2])
    one.save(folder)
    train(one, optimizer, steps[2:])
    two, right = made(other, build)
    again = two.optimizer(make)
    two.load(folder)
    train(two, again, steps[2:])
    with torch.no_grad():
        whole = one.whole()
        for name, tensor in [*right.named_parameters(), *right.named_buffers()]:
            tensor.copy_(whole[name])
    return {"apart": apart(two.whole(), right)}


def handed(layout: str) -> dict[str, Any]:
    """A model that is large though below the limit: rank 0 builds it, and ranks get rows of it."""
    small, draft, calls = begin.SMALL_BYTES, begin.defer_init, list[int]()

    def heard(*args: Any, **more: Any) -> Any:
        calls.append(1)
        return draft(*args, **more)

    begin.SMALL_BYTES, begin.defer_init = 100, heard
    try:
        return {**plain_loop(layout), "drafted": len(calls)}
    finally:
        begin.SMALL_BYTES, begin.defer_init = small, draft


def large(layout: str) -> dict[str, Any]:
    """A model beyond the limit has the values of its names under every layout; one beyond `small` those of a build."""
    limited, _ = made(layout, settings={"init.limit": 100})
    found = {name: round(float(value.double().sum()), 6) for name, value in limited.whole().items()}
    return {"values": found}


def dropped(layout: str) -> dict[str, Any]:
    """Gradients thrown away: of a whole step, in the midst of one, of one of two optimizers, and with zeros."""
    placed, right = made(layout)

    def halves(named: list[tuple[str, nn.Parameter]]) -> list[torch.optim.Optimizer]:
        first = [p for n, p in named if n.startswith("blocks")]
        return [adam_of(first), adam_of([p for n, p in named if not n.startswith("blocks")])]

    ours, theirs = placed.optimizer(halves), halves(list(right.named_parameters()))
    for step, (x, y) in enumerate(batches()):
        for optimizer in theirs:
            optimizer.zero_grad()
        for number, keeps in enumerate((step != 0, step == 2, True)):
            is_last = number == 2 or not keeps
            placed.backward(F.cross_entropy(placed.model(mine(placed, x)), mine(placed, y)), last=is_last)
            F.cross_entropy(right(x), y).backward()
            for optimizer in () if keeps else (*ours, *theirs):
                optimizer.zero_grad(set_to_none=step < 2)
        if step == 1:
            for optimizers in (ours, theirs):
                optimizers[0].zero_grad()
        if step == 3:
            placed.model.leave.zero_grad(set_to_none=False)
            right.leave.zero_grad(set_to_none=False)
        for optimizer in (*ours, *theirs):
            optimizer.step()
    return {"apart": apart(placed.whole(), right)}


def adam_of(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def frozen(layout: str) -> dict[str, Any]:
    """A layer frozen in mid-training, found sharded or gathered (after an evaluation), and let go again."""
    placed, right = made(layout)
    ours, theirs = placed.optimizer(adam), adam(list(right.named_parameters()))
    for step, (x, y) in enumerate(batches()):
        if step in (1, 2):
            with torch.no_grad():
                placed.model(x)
        for model in (placed.model, right):
            model.blocks[0].requires_grad_(step != 1)
            model.leave.requires_grad_(step not in (1, 2))
        placed.backward(F.cross_entropy(placed.model(mine(placed, x)), mine(placed, y)))
        ours.step()
        theirs.zero_grad()
        F.cross_entropy(right(x), y).backward()
        theirs.step()
    return {"apart": apart(placed.whole(), right)}


def changed(layout: str) -> dict[str, Any]:
    """Gradients changed between backward and step."""
    placed, right = made(layout)
    ours, theirs = placed.optimizer(sgd), sgd(list(right.named_parameters()))
    for x, y in batches():
        placed.backward(F.cross_entropy(placed.model(mine(placed, x)), mine(placed, y)))
        for gradient in placed.gradients().values():
            gradient.mul_(3).clamp_(-0.02, 0.02)
        placed.clip(0.1)
        ours.step()
        theirs.zero_grad()
        F.cross_entropy(right(x), y).backward()
        for p in right.parameters():
            if p.grad is not None:
                p.grad.mul_(3).clamp_(-0.02, 0.02)
        nn.utils.clip_grad_norm_(right.parameters(), 0.1)
        theirs.step()
    return {"apart": apart(placed.whole(), right)}


def told(layout: str) -> dict[str, Any]:
    """What is refused of work on gradients that are not whole here: the first line of each."""
    placed, _ = made(layout)
    optimizer = placed.optimizer(adam)
    x, y = next(batches())
    parameters = list(placed.model.parameters())

    def loss() -> Tensor:
        return F.cross_entropy(placed.model(mine(placed, x)), mine(placed, y))

    def replaced() -> None:
        parameters[0].grad = torch.zeros_like(parameters[0])
        optimizer.step()

    def one_thrown_away() -> None:
        placed.model.leave.zero_grad()
        placed.backward(loss())

    def written() -> None:
        with torch.no_grad():
            placed.model(x)
            placed.model.leave.bias.add_(1)
        loss()

    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    tries: dict[str, Callable[[], Any]] = {
        "norm": lambda: nn.utils.clip_grad_norm_(parameters, 1.0),
        "value": lambda: nn.utils.clip_grad_value_(parameters, 1.0),
        "read": lambda: [p.grad.square().sum() for p in parameters if p.grad is not None],
        "list": lambda: next(p.grad for p in parameters if p.grad is not None).tolist(),
        "scaler": lambda: scaler.unscale_(optimizer),
        "replaced": replaced,
        "part": one_thrown_away,
        "again": lambda: (placed.norm(), placed.backward(loss())),
    }
    if layout == "fsdp":
        tries["penalty"] = lambda: placed.backward(loss() + sum(p.square().sum() for p in parameters))
        tries["whole penalty"] = lambda: placed.backward(
            loss() + sum(p.square().sum().full_tensor() for p in parameters if hasattr(p, "full_tensor"))  # type: ignore[operator]
        )
    if layout in ("fsdp", "tp=2"):
        tries["copy"] = lambda: copy.deepcopy(placed.model)
    if layout != "fsdp":
        tries["plain"] = lambda: loss().backward()
    else:
        tries["gathered"] = written
    found = {}
    for name, attempt in tries.items():
        optimizer.zero_grad()
        with contextlib.suppress(PacelineError):  # what the last attempt left
            placed.backward(loss())
        try:
            attempt()
        except PacelineError as error:
            found[name] = error.what
        else:
            found[name] = "not refused"
        with contextlib.suppress(PacelineError):
            optimizer.step()
    return found


CASES = {
    "plain": plain_loop,
    "counted": counted_loop,
    "gan": gan,
    "files": files,
    "numbers": numbers,
    "large": large,
    "handed": handed,
}
CASES |= {"dropped": dropped, "frozen": frozen, "changed": changed, "told": told}


def main() -> None:
    torch.set_num_threads(1)
    if sys.argv[2] == "theirs":  # a script that has made its own group
        dist.init_process_group("gloo", timeout=timedelta(seconds=60))
        group = weakref.ref(dist.group.WORLD)
        if os.environ["RANK"] == "0":  # after what is registered later
            atexit.register(lambda: print(json.dumps(["group", "gone" if group() is None else "held"])))
    for word in sys.argv[3:]:
        case, _, layout = word.partition(":")
        found = CASES[case](layout)
        if int(os.environ["RANK"]) == 0:
            print(json.dumps([word, found]), flush=True)
    if sys.argv[2] == "theirs":
        assert dist.is_initialized()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
