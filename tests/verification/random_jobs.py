"""Random correct jobs from a seed: what users train, in each mixture that a layout allows.

A draw is plain JSON, so that ranks and a report can have it; `job_of` makes its job anew.
"""

import random
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset, RandomSampler

import paceline as pl
from paceline.config.layout import parse_layout
from tests.zoo import JOBS

WIDTH, CLASSES, SAMPLES, BATCH, LENGTH = 12, 5, 34, 8, 6
LAYOUTS: dict[int, tuple[str, ...]] = {
    1: ("single",),
    2: (
        "ddp", "ddp", "ddp", "zero1", "zero2", "fsdp", "tp", "pp", "pp", "pp,schedule=1f1b", "pp,schedule=zb_h1", "threads",
        "fsdp,remat=full", "tp,sequence=true", "cp", "ep",
    ),
    3: ("ddp", "zero1", "zero2", "fsdp"),
    4: (
        "hsdp", "dp_shard=2,tp=2", "pp=2,dp_replicate=2", "dp_replicate=2,tp=2", "pp=2,dp_shard=2", "pp=2,tp=2",
        "dp_shard=4,ep=2",
    ),
}  # fmt: skip
EXACT = ("single", "ddp", "zero1", "zero2", "fsdp", "hsdp")
OWN = ("mlp", "conv", "rnn", "rotary")
ZOO = ("text", "nano", "llama", "gpt2", "bert", "mixtral", "vit")
STASHED = ("pipedream", "2bw")
UPDATES = ("local,every=2", "diloco,every=2")
WIRES = ("bf16", "powersgd,rank=2", "topk,ratio=0.25", "int8,block=8")


@dataclass(frozen=True, kw_only=True)
class Draw:
    """One job, and how it runs."""

    seed: int
    ranks: int
    layout: str
    model: str
    update: str = "sync"
    compress: str = "none"
    job: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def processes(self) -> int:
        """How many run it."""
        return parse_layout(self.layout).processes(ranks=self.ranks)

    def as_json(self) -> dict[str, Any]:
        """For the pipe and the report."""
        return asdict(self)

    def __str__(self) -> str:
        more = [f"{name}={value}" for name, value in {**self.job, **self.settings}.items()]
        rules = [value for value in (self.update, self.compress) if value not in ("sync", "none")]
        return " ".join([f"#{self.seed}", self.model, self.layout, f"x{self.ranks}", *rules, *more])


def draw(seed: int) -> Draw:
    """The draw of this seed."""
    dice = random.Random(seed)
    ranks = dice.choices((1, 2, 3, 4), (2, 6, 2, 2))[0]
    layout = dice.choice(LAYOUTS[ranks])
    model = dice.choice(OWN if dice.random() < 0.7 else ZOO)
    if "ep" in layout:
        model = "mixtral"
    elif "cp" in layout:
        model = dice.choice(("text", "llama", "nano"))
    elif "tp" in layout or "remat" in layout:
        model = dice.choice((*ZOO[:6], "rotary"))
    settings: dict[str, Any] = {"seed": dice.randrange(1000)}
    kinds = (1, 0, 0) if model == "rnn" else (3, 2, 0) if "pp" in layout else (3, 2, 2)
    settings["train.precision"] = dice.choices(("fp32", "bf16", "fp16"), kinds)[0]
    if dice.random() < 0.4 or layout.startswith("pp"):
        settings["train.micro_batch_size"] = dice.choice((1, 2) if ranks > 2 or "pp" in layout else (1, 2, 4))
    if dice.random() < 0.5:
        settings["train.max_grad_norm"] = dice.choice((0.05, 1.0, 100.0))
    job: dict[str, Any] = {"optimizer": dice.choice(("sgd", "momentum", "adamw", "adamw", "rmsprop", "adagrad"))}
    job["lr"] = dice.choice((0.1, 0.01, 0.001))
    half = 0.0 if model == "rnn" else 0.15  # torch has no LSTM in half precision here
    for name, chance in (("schedule", 0.3), ("ema", 0.2), ("frozen", 0.2), ("half", half)):
        if dice.random() < chance:
            job[name] = True
    job["dropout"] = dice.choice((0.0, 0.0, 0.1, 0.5))
    if model in OWN:
        job |= _own(dice, model)
    update, compress = "sync", "none"
    if layout == "pp" and dice.random() < 0.4:
        update = dice.choice(STASHED)
    if layout == "ddp" and ranks > 1:
        update, compress = dice.choices(
            (("sync", "none"), (dice.choice(UPDATES), "none"), ("sync", dice.choice(WIRES))), (4, 2, 2)
        )[0]
        if job.get("norm") == "batch" and update == "sync" and compress == "none" and dice.random() < 0.4:
            settings["train.buffers"] = "sync_bn"
    if job.get("half"):  # under autocast torch has no such layer norm
        settings["train.precision"] = "fp32"
    if job.get("norm") == "batch" and settings.get("train.micro_batch_size") == 1:  # one value has no variance
        settings["train.micro_batch_size"] = 2
    is_plain = (update, compress, settings["train.precision"]) == ("sync", "none", "fp32") and not job.get("half")
    if is_plain and layout in EXACT and dice.random() < 0.15:
        settings["train.exact"] = True
    return Draw(
        seed=seed, ranks=ranks, layout=layout, model=model, update=update, compress=compress, job=job, settings=settings
    )


def _own(dice: random.Random, model: str) -> dict[str, Any]:
    """What only the models of this file have."""
    found: dict[str, Any] = {}
    found["norm"] = dice.choice(("none", "batch", "batch", "layer")) if model in ("mlp", "conv") else "none"
    found["data"] = dice.choice(("plain", "plain", "augmented", "collated", "objects", "sampled", "stream"))
    found["loss"] = dice.choice(("sum", "sum", "mean", "masked", "terms"))
    for name, chance in (("tied", 0.2), ("unused", 0.2), ("draws_in_eval", 0.1)):
        if dice.random() < chance:
            found[name] = True
    return found


class Mlp(nn.Module):
    """Layers with a norm, dropout, a tie, one that is never used."""

    def __init__(self, norm: str, dropout: float, tied: bool, unused: bool) -> None:
        super().__init__()
        self.first, self.middle, self.again = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        norms = {"batch": nn.BatchNorm1d, "layer": nn.LayerNorm}
        self.norm = norms[norm](WIDTH) if norm in norms else nn.Identity()
        self.dropout, self.head = nn.Dropout(dropout), nn.Linear(WIDTH, CLASSES)
        if tied:
            self.again.weight = self.middle.weight
        if unused:
            self.spare = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.dropout(torch.tanh(self.norm(self.first(x))))
        h = h + torch.tanh(self.again(torch.relu(self.middle(h))))
        found: Tensor = self.head(h)
        return found


class Conv(nn.Module):
    """Convolutions with a bias before BatchNorm: a gradient that is rounding alone."""

    def __init__(self, norm: str, dropout: float, tied: bool, unused: bool) -> None:
        super().__init__()
        self.c1, self.c2 = nn.Conv1d(1, 4, 3, padding=1), nn.Conv1d(4, 4, 3, padding=1)
        self.n1, self.n2 = ((nn.BatchNorm1d(4) if norm == "batch" else nn.GroupNorm(2, 4)) for _ in range(2))
        self.c3 = self.c2 if tied else nn.Conv1d(4, 4, 3, padding=1)
        self.dropout, self.head = nn.Dropout1d(dropout), nn.Linear(4 * WIDTH, CLASSES)
        if unused:
            self.spare = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.n1(self.c1(x[:, None])))
        h = self.dropout(torch.relu(self.n2(self.c3(self.c2(h)))))
        found: Tensor = self.head(h.flatten(1))
        return found


class Rnn(nn.Module):
    """An LSTM over the row in pieces."""

    def __init__(self, norm: str, dropout: float, tied: bool, unused: bool) -> None:
        super().__init__()
        self.cells = nn.GRU(3, 8, 2, dropout=dropout, batch_first=True) if tied else nn.LSTM(3, 8, batch_first=True)
        self.head = nn.Linear(8, CLASSES)
        if unused:
            self.spare = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.cells(x.unflatten(1, (-1, 3)))[0][:, -1])
        return found


class Rotary(nn.Module):
    """One block of attention with complex rotary tables in a buffer, and a key bias, whose true gradient is zero."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 8)
        self.up, self.down, self.dropout = nn.Linear(8, 16), nn.Linear(16, 8), nn.Dropout(dropout)
        angles = torch.outer(torch.arange(LENGTH).float(), torch.tensor([1.0, 0.1]))
        self.register_buffer("turns", torch.polar(torch.ones_like(angles), angles))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        seen = F.scaled_dot_product_attention(self._turn(q), self._turn(k), v)
        x = x + self.dropout(self.out(seen.transpose(1, 2).flatten(2)))
        found: Tensor = x + self.down(torch.relu(self.up(x)))
        return found

    def _turn(self, x: Tensor) -> Tensor:
        wide = x if x.dtype is torch.float64 else x.float()
        pairs = torch.view_as_complex(wide.unflatten(-1, (2, 2)).contiguous())
        return torch.view_as_real(pairs * self.turns).flatten(-2).to(x.dtype)


class Rotating(nn.Module):
    """A row as a sequence of tokens, through rotary blocks."""

    def __init__(self, norm: str, dropout: float, tied: bool, unused: bool) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(2, 8), nn.Linear(8, CLASSES)
        self.blocks = nn.ModuleList(Rotary(dropout) for _ in range(2))
        if tied:
            self.blocks[1].out.weight = self.blocks[0].out.weight  # type: ignore[union-attr]
        if unused:
            self.spare = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x.unflatten(1, (-1, 2)))
        for block in self.blocks:
            h = block(h)
        found: Tensor = self.head(h.mean(1))
        return found


class Rows(Dataset[Any]):
    """A row and its class, functions of the index; `augmented` draws at each reading."""

    def __init__(self, kind: str, dtype: torch.dtype, samples: int = SAMPLES) -> None:
        self.kind, self.dtype, self.samples = kind, dtype, samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < self.samples:
            raise IndexError(index)
        made = torch.Generator().manual_seed(index)
        row, label = torch.randn(WIDTH, generator=made), int(torch.randint(CLASSES, (), generator=made))
        if self.kind == "augmented":
            row = row * (1.0 + 0.1 * torch.rand(WIDTH))
        return row.to(self.dtype), Tag(index) if self.kind == "objects" else 0, label


class Tag:
    """An object of the user's own in each sample."""

    def __init__(self, index: int) -> None:
        self.name = f"sample {index}"


class Stream(IterableDataset[Any]):
    """The same rows, one after another."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows

    def __iter__(self) -> Any:
        return (self.rows[index] for index in range(len(self.rows)))


class Batches:
    """Rows and classes as tensors; the tags as they are, in a list; `collated` draws once for the microbatch."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __call__(self, rows: list[Any]) -> Any:
        x, tags, y = zip(*rows, strict=True)
        batch = torch.stack(x)
        if self.kind == "collated":
            batch = batch * (1.0 + 0.1 * torch.rand(()))
        return {"x": batch, "tags": list(tags), "y": torch.tensor(y)}


def _labels(batch: Any) -> Tensor:
    found: Tensor = batch["y"]
    return found


def _summed(output: Tensor, batch: Any) -> Any:
    return F.cross_entropy(output, _labels(batch), reduction="sum"), len(output)


def _mean(output: Tensor, batch: Any) -> Any:
    return F.cross_entropy(output, _labels(batch))


def _masked(output: Tensor, batch: Any) -> Any:
    kept = (_labels(batch) > 0).to(output.dtype)
    return (F.cross_entropy(output, _labels(batch), reduction="none") * kept).sum(), kept.sum()


def _terms(output: Tensor, batch: Any) -> Any:
    return {"label": _summed(output, batch), "size": (0.1 * output.square().sum(), len(output))}


def _counts(batch: Any) -> Any:
    return {"label": len(_labels(batch)), "size": len(_labels(batch))}


_COUNTS: dict[str, Callable[[Any], Any]] = {
    "terms": _counts,
    "sum": lambda batch: len(_labels(batch)),
    "masked": lambda batch: (_labels(batch) > 0).sum(),
}
_LOSSES = {"sum": _summed, "mean": _mean, "masked": _masked, "terms": _terms}
_OWN: dict[str, Callable[..., nn.Module]] = {"mlp": Mlp, "conv": Conv, "rnn": Rnn, "rotary": Rotating}


def _optimizer(one: Draw) -> Callable[[Any], torch.optim.Optimizer]:
    made: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
        "sgd": lambda p: torch.optim.SGD(p, lr=one.job["lr"]),
        "momentum": lambda p: torch.optim.SGD(p, lr=one.job["lr"], momentum=0.9, weight_decay=0.01, nesterov=True),
        "adamw": lambda p: torch.optim.AdamW(p, lr=one.job["lr"]),
        "rmsprop": lambda p: torch.optim.RMSprop(p, lr=one.job["lr"]),
        "adagrad": lambda p: torch.optim.Adagrad(p, lr=one.job["lr"]),
    }
    return lambda named: made[one.job["optimizer"]]([p for _, p in named])


def _frozen(model: nn.Module) -> nn.Module:
    first = next(iter(model.parameters()))
    first.requires_grad_(False)
    return model


def job_of(one: Draw) -> pl.Job:
    """The job of a draw."""
    job, half = one.job, bool(one.job.get("half"))
    dtype = torch.bfloat16 if half else torch.float32

    def finished(model: nn.Module) -> nn.Module:
        return (_frozen(model) if job.get("frozen") else model).to(dtype)

    common: dict[str, Any] = {"optimizer": _optimizer(one)}
    if job.get("schedule"):
        common["lr_schedule"] = lambda o: torch.optim.lr_scheduler.StepLR(o, 1, 0.7)
    if job.get("ema"):
        common["ema"] = 0.9
    if one.model not in OWN:
        takes_dropout = one.model in ("text", "nano", "gpt2", "bert", "vit")
        base = JOBS[one.model](**({"dropout": job["dropout"]} if takes_dropout else {}))
        made = base.model
        return _replaced(base, model=lambda: finished(made()), **common)
    kind = job["data"]
    rows = Rows(kind, dtype)
    given = {"norm": job["norm"], "dropout": job["dropout"]}
    given |= {"tied": bool(job.get("tied")), "unused": bool(job.get("unused"))}
    if job["loss"] == "terms" or (job["loss"] in _COUNTS and one.settings["train.precision"] == "fp16"):
        common["count"] = _COUNTS[job["loss"]]
    if kind == "sampled":
        common["order"] = RandomSampler(rows, replacement=True, num_samples=SAMPLES)

    def forward(model: nn.Module, batch: Any) -> Any:
        x = batch["x"]
        if job.get("draws_in_eval") and not model.training:
            x = x + 0.1 * torch.rand_like(x)
        return model(x)

    return pl.Job(
        model=lambda: finished(_OWN[one.model](**given)),
        forward=forward,
        loss=_LOSSES[job["loss"]],
        train_data=Stream(rows) if kind == "stream" else rows,
        eval_data=Rows("augmented" if job.get("draws_in_eval") else "plain", dtype, 19),
        metrics={"right": lambda output, batch: ((output.argmax(-1) == _labels(batch)).sum(), len(output))},
        collate=Batches(kind),
        global_batch_size=BATCH,
        **common,
    )


def _replaced(job: pl.Job, **changes: Any) -> pl.Job:
    values = {name: getattr(job, name) for name in job.__dataclass_fields__}
    data = values["train_data"]
    data.samples = 17
    return pl.Job(**{**values, **changes})


def is_asynchronous(one: Draw) -> bool:
    """Whether its replicas train on their own for a while."""
    return one.update != "sync"
