"""Small jobs for the layout matrix: every kind of model that a user brings, each step a few milliseconds.

Four repeated blocks, width 32, four heads, a vocabulary of 64, synthetic data that is a function of the index alone.
`tests/zoo.py:llama` is a job for the command line; `JOBS["llama"]()` the same in Python. The Hugging Face models are
unmodified; their batches are dicts with `labels`, and the loss is the model's own.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

import paceline as pl
from paceline.examples import text as text_example

WIDTH, HEADS, DEPTH, VOCAB, LENGTH, BATCH, SAMPLES = 32, 4, 4, 64, 16, 8, 64
PAIR = {"0": 1, "1": 1}  # ids and targets: the sequence is the second dimension of both


class Rows(Dataset[Any]):
    """`make(generator)` for each index, from a generator that the index alone seeds."""

    def __init__(self, make: Callable[[torch.Generator], Any], samples: int = SAMPLES) -> None:
        self.make, self.samples = make, samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < self.samples:
            raise IndexError(index)
        return self.make(torch.Generator().manual_seed(1000 + index))


def tokens(generator: torch.Generator, length: int = LENGTH) -> Tensor:
    """Ids that can be learnt: mostly a walk, sometimes a jump. 0 to 3 are left for padding, masks and starts."""
    start, step = torch.randint(0, 60, (2,), generator=generator).tolist()
    walk = (start + (1 + step % 3) * torch.arange(length)) % 60
    jumps = torch.rand(length, generator=generator) < 0.1
    return 4 + torch.where(jumps, torch.randint(0, 60, (length,), generator=generator), walk)


def causal(generator: torch.Generator) -> dict[str, Tensor]:
    """The labels are the ids, the first three of them without a target; the model shifts."""
    ids = tokens(generator)
    labels = ids.clone()
    labels[: int(torch.randint(0, 4, (), generator=generator))] = -100
    return {"input_ids": ids, "labels": labels}


def padded_causal(generator: torch.Generator) -> dict[str, Tensor]:
    """The same with padding at the end of some."""
    row = causal(generator)
    mask = (torch.arange(LENGTH) < int(torch.randint(LENGTH // 2, LENGTH + 1, (), generator=generator))).long()
    return {
        "input_ids": row["input_ids"] * mask,
        "attention_mask": mask,
        "labels": torch.where(mask.bool(), row["labels"], -100),
    }


def masked(generator: torch.Generator) -> dict[str, Tensor]:
    """About a third of the ids masked (3), only these have a target; padding at the end of some."""
    ids = tokens(generator)
    mask = (torch.arange(LENGTH) < int(torch.randint(LENGTH // 2, LENGTH + 1, (), generator=generator))).long()
    hidden = (torch.rand(LENGTH, generator=generator) < 0.3) & mask.bool()
    hidden[0] = True
    return {
        "input_ids": torch.where(hidden, 3, ids) * mask,
        "attention_mask": mask,
        "labels": torch.where(hidden, ids, -100),
    }


def translated(generator: torch.Generator) -> dict[str, Tensor]:
    """The target is the source backwards, shorter."""
    ids = tokens(generator)
    return {
        "input_ids": ids,
        "attention_mask": torch.ones(LENGTH, dtype=torch.long),
        "labels": ids.flip(0)[: LENGTH // 2],
    }


def pictures(generator: torch.Generator) -> dict[str, Tensor]:
    """Noise, with the mean telling the class."""
    label = torch.randint(0, 10, (), generator=generator)
    return {"pixel_values": torch.randn(3, 16, 16, generator=generator) + label / 5, "labels": label}


def next_tokens(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """For models without a loss of their own."""
    ids = tokens(generator, LENGTH + 1)
    return ids[:-1], ids[1:]


def numbered(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Images of one channel."""
    row = pictures(generator)
    return row["pixel_values"][:1, ::2, ::2], row["labels"]


def _adamw(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for _, p in named], lr=1e-3, weight_decay=0.01)


def _job(model: Callable[[], nn.Module], make: Callable[[torch.Generator], Any], **more: Any) -> pl.Job:
    given: dict[str, Any] = {
        "model": model,
        "train_data": Rows(make),
        "optimizer": _adamw,
        "global_batch_size": BATCH,
        "max_grad_norm": 1.0,
        "settings": {"train.steps": 2},
    }
    return pl.Job(**(given | more))


def _summed(logits: Tensor, batch: Any) -> tuple[Tensor, int]:
    targets = batch[-1]
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="sum"), targets.numel()


def text(dropout: float = 0.0, depth: int = DEPTH, heads: int = HEADS) -> pl.Job:
    """The text example's model."""
    return _job(
        lambda: text_example.GPT(WIDTH, depth, heads, LENGTH, dropout), next_tokens, loss=_summed, sequence=PAIR
    )


class Digits(nn.Module):
    """A ConvNet with BatchNorm, dropout, and no chain of equal blocks."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, padding=1), nn.BatchNorm2d(2 * width), nn.ReLU(), nn.MaxPool2d(2),
        )  # fmt: skip
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(2 * width * 16, 10)

    def forward(self, images: Tensor) -> Tensor:
        found: Tensor = self.head(self.dropout(self.features(images).flatten(1)))
        return found


def digits(dropout: float = 0.1) -> pl.Job:
    """The digits example's model, on images made here."""
    return _job(lambda: Digits(8, dropout), numbered, loss=_summed, count=lambda batch: len(batch[-1]))


class Block(nn.Module):
    """Pre-norm attention and MLP, as nanoGPT has them: one fused projection, a mask in a buffer."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.c_fc, self.c_out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("bias", torch.tril(torch.ones(LENGTH, LENGTH)).view(1, 1, LENGTH, LENGTH))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            t.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for t in self.c_attn(self.ln_1(x)).split(width, dim=2)
        )
        scores = (q @ k.transpose(-2, -1)) * (width // self.heads) ** -0.5
        scores = scores.masked_fill(self.bias[:, :, :length, :length] == 0, float("-inf"))
        seen = (self.dropout(scores.softmax(-1)) @ v).transpose(1, 2).reshape(batch, length, width)
        x = x + self.dropout(self.c_proj(seen))
        return x + self.dropout(self.c_out(F.gelu(self.c_fc(self.ln_2(x)))))


class Nano(nn.Module):
    """Modules in a ModuleDict, weights tied, an init of its own, the loss inside the forward when targets come."""

    def __init__(self, dropout: float, depth: int) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(VOCAB, WIDTH),
                "wpe": nn.Embedding(LENGTH, WIDTH),
                "drop": nn.Dropout(dropout),
                "h": nn.ModuleList([Block(WIDTH, HEADS, dropout) for _ in range(depth)]),
                "ln_f": nn.LayerNorm(WIDTH),
            }
        )
        self.lm_head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.transformer.wte.weight = self.lm_head.weight
        self.apply(self._init_weights)
        for name, parameter in self.named_parameters():
            if name.endswith("c_proj.weight"):
                nn.init.normal_(parameter, mean=0.0, std=0.02 / (2 * depth) ** 0.5)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, ids: Tensor) -> Tensor:
        place = torch.arange(ids.shape[1], dtype=torch.long, device=ids.device)
        x = self.transformer.drop(self.transformer.wte(ids) + self.transformer.wpe(place))
        for block in self.transformer.h:
            x = block(x)
        found: Tensor = self.lm_head(self.transformer.ln_f(x))
        return found


def nano(dropout: float = 0.0, depth: int = DEPTH) -> pl.Job:
    """A model of the user's own, tied."""
    return _job(lambda: Nano(dropout, depth), next_tokens, loss=_summed, sequence=PAIR)


def llama(tied: bool = False, padded: bool = False, depth: int = DEPTH) -> pl.Job:
    """Grouped-query attention: four heads, two of keys and values."""
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=48, num_hidden_layers=depth, num_attention_heads=HEADS,
        num_key_value_heads=2, max_position_embeddings=LENGTH, tie_word_embeddings=tied, use_cache=False,
    )  # fmt: skip
    return _job(lambda: LlamaForCausalLM(config), padded_causal if padded else causal)


def gpt2(dropout: float = 0.0, padded: bool = False, depth: int = DEPTH) -> pl.Job:
    """Tied; its linear layers are stored transposed."""
    config = GPT2Config(
        vocab_size=VOCAB, n_embd=WIDTH, n_layer=depth, n_head=HEADS, n_positions=LENGTH, resid_pdrop=dropout,
        embd_pdrop=dropout, attn_pdrop=dropout, bos_token_id=1, eos_token_id=1, use_cache=False,
    )  # fmt: skip
    return _job(lambda: GPT2LMHeadModel(config), padded_causal if padded else causal)


def bert(dropout: float = 0.0, depth: int = DEPTH) -> pl.Job:
    """Masked tokens, padding masks, tied."""
    config = BertConfig(
        vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=48, num_hidden_layers=depth, num_attention_heads=HEADS,
        max_position_embeddings=LENGTH, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout,
    )  # fmt: skip
    return _job(lambda: BertForMaskedLM(config), masked)


def t5(dropout: float = 0.0, depth: int = DEPTH) -> pl.Job:
    """An encoder and a decoder; position biases that the first block of each makes for the others."""
    config = T5Config(
        vocab_size=VOCAB, d_model=WIDTH, d_kv=8, d_ff=48, num_layers=depth, num_heads=HEADS, dropout_rate=dropout,
        decoder_start_token_id=0, use_cache=False,
    )  # fmt: skip
    return _job(lambda: T5ForConditionalGeneration(config), translated)


def vit(dropout: float = 0.0, depth: int = DEPTH) -> pl.Job:
    """Images to classes."""
    config = ViTConfig(
        hidden_size=WIDTH, intermediate_size=48, num_hidden_layers=depth, num_attention_heads=HEADS, image_size=16,
        patch_size=4, num_labels=10, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout,
    )  # fmt: skip
    return _job(lambda: ViTForImageClassification(config), pictures)


def mixtral(balanced: bool = False, depth: int = DEPTH, experts: int = 4) -> pl.Job:
    """Two experts for each token; `balanced` adds the router's own loss."""
    config = MixtralConfig(
        vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=48, num_hidden_layers=depth, num_attention_heads=HEADS,
        num_key_value_heads=2, max_position_embeddings=LENGTH, num_local_experts=experts, num_experts_per_tok=2,
        output_router_logits=balanced, use_cache=False,
    )  # fmt: skip
    return _job(lambda: MixtralForCausalLM(config), causal)


def qwen3_moe(depth: int = DEPTH, experts: int = 4) -> pl.Job:
    """Experts in each layer, and norms of queries and keys."""
    config = Qwen3MoeConfig(
        vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=48, moe_intermediate_size=24, num_hidden_layers=depth,
        num_attention_heads=HEADS, num_key_value_heads=2, head_dim=8, max_position_embeddings=LENGTH,
        num_experts=experts, num_experts_per_tok=2, use_cache=False,
    )  # fmt: skip
    return _job(lambda: Qwen3MoeForCausalLM(config), causal)


JOBS: dict[str, Callable[..., pl.Job]] = {
    "text": text,
    "digits": digits,
    "nano": nano,
    "llama": llama,
    "gpt2": gpt2,
    "bert": bert,
    "t5": t5,
    "vit": vit,
    "mixtral": mixtral,
    "qwen3_moe": qwen3_moe,
}
