"""Models, losses and optimizers that some layout refuses, and the head of a job file."""

import random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import paceline as pl

WIDTH, VOCAB, LENGTH = 16, 32, 8


class Block(nn.Module):
    """Attention and an MLP."""

    def __init__(self, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(WIDTH)
        self.q, self.k, self.v = (nn.Linear(WIDTH, 4 * heads) for _ in range(3))
        self.o = nn.Linear(4 * heads, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        h = self.norm(x)
        q, k, v = (p(h).view(batch, length, self.heads, 4).transpose(1, 2) for p in (self.q, self.k, self.v))
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        x = x + self.o(seen.reshape(batch, length, -1))
        found: Tensor = x + self.down(F.gelu(self.up(x)))
        return found


class Tiny(nn.Module):
    """Four blocks: what most of the others change in one thing."""

    def __init__(self, heads: int = 4, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList([Block(heads) for _ in range(4)])
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        found: Tensor = self.head(x)
        return found


class Skip(Tiny):
    """The first block's output goes around the others."""

    def forward(self, ids: Tensor) -> Tensor:
        x = first = self.layers[0](self.embed(ids))
        for layer in self.layers[1:]:
            x = layer(x)
        found: Tensor = self.head(x + first)
        return found


class Branch(Tiny):
    """What is done between blocks depends on the data."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
            if x.sum() > 0:
                x = x * 0.5
        found: Tensor = self.head(x)
        return found


class Twice(Tiny):
    """Each block runs twice."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in [*self.layers, *self.layers]:
            x = layer(x)
        found: Tensor = self.head(x)
        return found


class ReadByName(Tiny):
    """The head is the embedding, read where no module holds it; `tied`, beside one that does."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        found = F.linear(x, self.embed.weight)
        return found + self.head(x)


class Attributes(nn.Module):
    """Blocks in no list."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.one, self.two, self.head = (
            nn.Embedding(VOCAB, WIDTH),
            Block(),
            Block(),
            nn.Linear(WIDTH, VOCAB),
        )

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = self.head(self.two(self.one(self.embed(ids))))
        return found


class Fork(Attributes):
    """Blocks in no list, and a branch between them."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.one(self.embed(ids))
        found: Tensor = self.head(self.two(x) if x.sum() > 0 else x)
        return found


class Luck(Attributes):
    """Blocks in no list, of which Python's own generator skips one."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.one(self.embed(ids))
        found: Tensor = self.head(self.two(x) if random.random() < 0.5 else x)
        return found


class Whole(nn.Linear):
    """Weights that are no floats."""

    def __init__(self) -> None:
        super().__init__(WIDTH, 2 * WIDTH)
        self.weight = nn.Parameter(torch.ones(2 * WIDTH, WIDTH, dtype=torch.int8), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype), self.bias)


class Quantised(Tiny):
    """One of its projections holds integers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[0].up = Whole()


class Turned(Tiny):
    """A weight that is a view of another memory order."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = nn.Parameter(torch.randn(WIDTH, VOCAB).t())


class Mixed(Tiny):
    """Layers of two types."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[1].norm.to(torch.bfloat16)


class Checkpointed(Tiny):
    """As transformers marks a model that checkpoints by itself."""

    gradient_checkpointing = True


class Written(nn.Module):
    """What selective remat would keep is overwritten."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        parts = [[nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH)] for _ in range(4)]
        self.layers = nn.Sequential(*[nn.Sequential(*part) for part in parts])
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = self.head(self.layers(self.embed(ids)))
        return found


class Images(nn.Module):
    """Convolutions, and a table too small to be a vocabulary."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv1d(1, WIDTH, 3, padding=1), nn.ReLU(), nn.Conv1d(WIDTH, VOCAB, 3, padding=1))
        self.norm = nn.BatchNorm1d(VOCAB) if norm else nn.Identity()

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = self.norm(self.layers(ids.float()[:, None])).transpose(1, 2)
        return found


class Recurrent(nn.Module):
    """Each position waits for the one before it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.rnn = nn.Embedding(VOCAB, WIDTH), nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = self.head(self.rnn(self.embed(ids))[0])
        return found


class ByHand(Tiny):
    """Attention that nobody can see."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        found: Tensor = self.head((x @ x.transpose(1, 2)).softmax(-1) @ x)
        return found


class Pooled(Tiny):
    """One output for a sequence."""

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids).mean(1)


class Bare(Tiny):
    """No memory."""

    def __init__(self) -> None:
        with torch.device("meta"):
            super().__init__()


class Loop(Tiny):
    """Experts in a loop, each with the tokens that were sent to it."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(4)])

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        found: Tensor = self.head(torch.stack([expert(x) for expert in self.experts]).mean(0))
        return found


class Few(nn.Module):
    """Experts of which none takes more than three tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(4)])

    def forward(self, tokens: Tensor, expert_index: Tensor, expert_weight: Tensor) -> Tensor:
        out = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            token, choice = (found[:3] for found in torch.where(expert_index == number))
            out = out.index_add(0, token, expert(tokens[token]) * expert_weight[token, choice, None])
        return out


class Limited(Tiny):
    """What is over is dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.few = nn.Linear(WIDTH, 4), Few()

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids).flatten(0, 1)
        weight, index = self.gate(x).softmax(-1).topk(2)
        found: Tensor = self.head(x + self.few(x, index, weight)).unflatten(0, ids.shape)
        return found


class Layerwise(torch.optim.Optimizer):
    """Every parameter's step depends on all gradients."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        every = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = sum(p.grad.square().sum() for p in every) ** 0.5
        for p in every:
            p -= 0.1 * p.grad / (norm + 1)


class Keeper(torch.optim.SGD):
    """Has a list of its own."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.mine = list(self.param_groups[0]["params"])


def summed(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    """The loss of all jobs but those that try another."""
    return F.cross_entropy(output.flatten(0, -2), batch[1].flatten(), reduction="sum"), batch[1].numel()


def mean(output: Tensor, batch: Any) -> Tensor:
    """One number."""
    return F.cross_entropy(output.flatten(0, -2), batch[1].flatten())


def classed(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    """For one output a sequence."""
    return F.cross_entropy(output, batch[1][:, 0], reduction="sum"), len(output)


def neighbours(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    """Shifts by itself."""
    logits, ids = output[:, :-1], batch[0][:, 1:]
    return F.cross_entropy(logits.flatten(0, -2), ids.flatten(), reduction="sum"), ids.numel()


def rows(length: int = LENGTH) -> list[Any]:
    """Pairs of ids and the next ones."""
    ids = torch.randint(0, VOCAB, (32, length + 1), generator=torch.Generator().manual_seed(1))
    return [(row[:-1], row[1:]) for row in ids]


def adamw(named: Any, **more: Any) -> torch.optim.Optimizer:
    """As most jobs have it."""
    return torch.optim.AdamW([p for _, p in named], lr=1e-3, **more)


def muon(named: Any) -> list[torch.optim.Optimizer]:
    """Muon for matrices."""
    matrices, rest = [p for _, p in named if p.dim() == 2], [p for _, p in named if p.dim() != 2]
    return [torch.optim.Muon(matrices, lr=1e-3), torch.optim.AdamW(rest, lr=1e-3)]


def adafactor(named: Any) -> torch.optim.Optimizer:
    """Factors of whole matrices."""
    return torch.optim.Adafactor([p for _, p in named])


def peeking(named: Any) -> torch.optim.Optimizer:
    """Groups by values."""
    return torch.optim.AdamW([{"params": [p], "lr": 1e-3 * p.detach().abs().max().item()} for _, p in named])


def job_of(model: Any = Tiny, **changes: Any) -> pl.Job:
    """A job that trains, with these changes."""
    given: dict[str, Any] = {"train_data": rows(), "optimizer": adamw, "global_batch_size": 8, "loss": summed}
    return pl.Job(**{"model": model, **given, **changes})


def hugging(kind: str, **more: Any) -> pl.Job:
    """A tiny model of transformers, with the loss that it brings."""
    import transformers

    config = getattr(transformers, f"{kind}Config")(
        vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=WIDTH, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=LENGTH, use_cache=False, **more,
    )  # fmt: skip
    data = [{"input_ids": ids, "labels": ids} for ids, _ in rows()]
    return job_of(lambda: getattr(transformers, f"{kind}ForCausalLM")(config), train_data=data, loss=None)


def translation() -> pl.Job:
    """An encoder and a decoder."""
    import transformers

    config = transformers.T5Config(
        vocab_size=VOCAB, d_model=WIDTH, d_kv=4, d_ff=WIDTH, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    data = [{"input_ids": ids, "labels": ids} for ids, _ in rows()]
    return job_of(lambda: transformers.T5ForConditionalGeneration(config), train_data=data, loss=None)
