"""Twelve families of models as jobs, large enough that weights, optimizer and activations each matter in some setting.

Models from `transformers` are built from their configs, unmodified. Every family takes its depth; sequences take
`length`, pictures `side`. Data are noise of fixed shapes, a function of the index alone.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from benchmarks.memory.models import Encoder, Lstm, Mlp, Nano, ResNet, UNet
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
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

import paceline as pl

SAMPLES = 4096
CLASSES = 10
PAIR = {"0": 1, "1": 1}  # ids and targets: the sequence is the second dimension of both
Draw = Callable[[torch.Generator], Any]
OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-4),
    "adamw_foreach": lambda parameters: torch.optim.AdamW(parameters, lr=1e-4, foreach=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-4, momentum=0.9),
}


@dataclass(frozen=True)
class Rows(Dataset[Any]):
    """`draw` with a generator that the index alone seeds."""

    draw: Draw

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < SAMPLES:
            raise IndexError(index)
        return self.draw(torch.Generator().manual_seed(index))


def _job(model: Callable[[], nn.Module], draw: Draw, *, optimizer: str, clip: bool, **more: Any) -> pl.Job:
    return pl.Job(
        model=model,
        train_data=Rows(draw),
        optimizer=lambda named: OPTIMIZERS[optimizer]([parameter for _, parameter in named]),
        global_batch_size=8,
        max_grad_norm=1.0 if clip else None,
        **more,
    )


def _summed(logits: Tensor, batch: Any) -> tuple[Tensor, int]:
    targets = batch[-1]
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="sum"), targets.numel()


def _ids(generator: torch.Generator, length: int, vocabulary: int) -> Tensor:
    return torch.randint(4, vocabulary, (length,), generator=generator)


def _causal(length: int, vocabulary: int) -> Draw:
    def draw(generator: torch.Generator) -> dict[str, Tensor]:
        ids = _ids(generator, length, vocabulary)
        return {"input_ids": ids, "labels": ids.clone()}

    return draw


def _next(length: int, vocabulary: int) -> Draw:
    def draw(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        ids = _ids(generator, length + 1, vocabulary)
        return ids[:-1], ids[1:]

    return draw


def llama(
    width: int = 256, depth: int = 4, length: int = 128, vocabulary: int = 4096, heads: int = 8,
    optimizer: str = "adamw", clip: bool = True,
) -> pl.Job:  # fmt: skip
    """A decoder with grouped-query attention."""
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=width, intermediate_size=width * 11 // 4, num_hidden_layers=depth,
        num_attention_heads=heads, num_key_value_heads=heads // 2, max_position_embeddings=length, use_cache=False,
    )  # fmt: skip
    return _job(lambda: LlamaForCausalLM(config), _causal(length, vocabulary), optimizer=optimizer, clip=clip)


def gpt2(
    width: int = 256, depth: int = 4, length: int = 128, vocabulary: int = 4096, heads: int = 8, dropout: float = 0.1,
    optimizer: str = "adamw", clip: bool = True,
) -> pl.Job:  # fmt: skip
    """A decoder with dropout, its embedding tied to its head."""
    config = GPT2Config(
        vocab_size=vocabulary, n_embd=width, n_layer=depth, n_head=heads, n_positions=length, resid_pdrop=dropout,
        embd_pdrop=dropout, attn_pdrop=dropout, bos_token_id=1, eos_token_id=1, use_cache=False,
    )  # fmt: skip
    return _job(lambda: GPT2LMHeadModel(config), _causal(length, vocabulary), optimizer=optimizer, clip=clip)


def bert(
    width: int = 256, depth: int = 4, length: int = 128, vocabulary: int = 1024, heads: int = 8, dropout: float = 0.1,
    optimizer: str = "adamw", clip: bool = True,
) -> pl.Job:  # fmt: skip
    """An encoder that guesses masked tokens; every third is one."""
    config = BertConfig(
        vocab_size=vocabulary, hidden_size=width, intermediate_size=4 * width, num_hidden_layers=depth,
        num_attention_heads=heads, max_position_embeddings=length, hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )  # fmt: skip

    def draw(generator: torch.Generator) -> dict[str, Tensor]:
        ids = _ids(generator, length, vocabulary)
        hidden = torch.arange(length) % 3 == 0
        mask = torch.ones(length, dtype=torch.long)
        return {
            "input_ids": torch.where(hidden, 3, ids),
            "attention_mask": mask,
            "labels": torch.where(hidden, ids, -100),
        }

    return _job(lambda: BertForMaskedLM(config), draw, optimizer=optimizer, clip=clip)


def t5(
    width: int = 256, depth: int = 3, length: int = 128, vocabulary: int = 4096, heads: int = 8, dropout: float = 0.1,
    optimizer: str = "adamw", clip: bool = True,
) -> pl.Job:  # fmt: skip
    """An encoder and a decoder of half its length."""
    config = T5Config(
        vocab_size=vocabulary, d_model=width, d_kv=width // heads, d_ff=4 * width, num_layers=depth, num_heads=heads,
        dropout_rate=dropout, decoder_start_token_id=0, use_cache=False,
    )  # fmt: skip

    def draw(generator: torch.Generator) -> dict[str, Tensor]:
        ids = _ids(generator, length, vocabulary)
        return {"input_ids": ids, "attention_mask": torch.ones(length, dtype=torch.long), "labels": ids[: length // 2]}

    return _job(lambda: T5ForConditionalGeneration(config), draw, optimizer=optimizer, clip=clip)


def vit(
    width: int = 256, depth: int = 4, side: int = 96, patch: int = 8, heads: int = 8, dropout: float = 0.0,
    optimizer: str = "adamw", clip: bool = True,
) -> pl.Job:  # fmt: skip
    """Pictures to classes."""
    config = ViTConfig(
        hidden_size=width, intermediate_size=4 * width, num_hidden_layers=depth, num_attention_heads=heads,
        image_size=side, patch_size=patch, num_labels=CLASSES, hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )  # fmt: skip

    def draw(generator: torch.Generator) -> dict[str, Tensor]:
        label = torch.randint(0, CLASSES, (), generator=generator)
        return {"pixel_values": torch.randn(3, side, side, generator=generator), "labels": label}

    return _job(lambda: ViTForImageClassification(config), draw, optimizer=optimizer, clip=clip)


def mixtral(
    width: int = 192, depth: int = 3, length: int = 128, vocabulary: int = 2048, heads: int = 6, experts: int = 4,
    optimizer: str = "adamw", clip: bool = True,
) -> pl.Job:  # fmt: skip
    """A decoder with experts, two of them for each token."""
    config = MixtralConfig(
        vocab_size=vocabulary, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=depth,
        num_attention_heads=heads, num_key_value_heads=heads // 2, max_position_embeddings=length,
        num_local_experts=experts, num_experts_per_tok=2, use_cache=False,
    )  # fmt: skip
    return _job(lambda: MixtralForCausalLM(config), _causal(length, vocabulary), optimizer=optimizer, clip=clip)


def _pictures(side: int, *, dense: bool) -> Draw:
    def draw(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        shape = (side, side) if dense else ()
        return torch.randn(3, side, side, generator=generator), torch.randint(0, CLASSES, shape, generator=generator)

    return draw


def resnet(width: int = 32, depth: int = 2, side: int = 48, optimizer: str = "sgd", clip: bool = False) -> pl.Job:
    """Convolutions with BatchNorm."""
    draw = _pictures(side, dense=False)
    return _job(lambda: ResNet(width, depth, CLASSES), draw, optimizer=optimizer, clip=clip, loss=_summed)


def unet(width: int = 24, depth: int = 3, side: int = 64, optimizer: str = "adamw", clip: bool = False) -> pl.Job:
    """Convolutions down and up; a class for every pixel."""
    draw = _pictures(side, dense=True)
    return _job(lambda: UNet(width, depth, CLASSES), draw, optimizer=optimizer, clip=clip, loss=_summed)


def lstm(
    width: int = 256, depth: int = 2, length: int = 64, vocabulary: int = 4096, dropout: float = 0.1,
    optimizer: str = "adamw", clip: bool = True,
) -> pl.Job:  # fmt: skip
    """Text without attention."""
    draw = _next(length, vocabulary)
    return _job(lambda: Lstm(vocabulary, width, depth, dropout), draw, optimizer=optimizer, clip=clip, loss=_summed)


def mlp(given: int = 256, width: int = 1024, depth: int = 6, optimizer: str = "adamw", clip: bool = False) -> pl.Job:
    """Rows of numbers to classes."""

    def draw(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        return torch.randn(given, generator=generator), torch.randint(0, CLASSES, (), generator=generator)

    return _job(lambda: Mlp(given, width, depth, CLASSES), draw, optimizer=optimizer, clip=clip, loss=_summed)


def nano(
    width: int = 256, depth: int = 4, length: int = 128, vocabulary: int = 1024, heads: int = 8, dropout: float = 0.1,
    optimizer: str = "adamw", clip: bool = True,
) -> pl.Job:  # fmt: skip
    """A GPT of a few plain modules, tied."""
    return _job(
        lambda: Nano(vocabulary, length, width, depth, heads, dropout), _next(length, vocabulary),
        optimizer=optimizer, clip=clip, loss=_summed, sequence=PAIR,
    )  # fmt: skip


def encoder(
    width: int = 256, depth: int = 4, length: int = 128, vocabulary: int = 4096, heads: int = 8, dropout: float = 0.1,
    optimizer: str = "adamw", clip: bool = True,
) -> pl.Job:  # fmt: skip
    """torch's own TransformerEncoder, tokens to classes."""

    def draw(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        return _ids(generator, length, vocabulary), torch.randint(0, CLASSES, (), generator=generator)

    return _job(
        lambda: Encoder(vocabulary, length, width, depth, heads, dropout), draw, optimizer=optimizer, clip=clip,
        loss=_summed,
    )  # fmt: skip


JOBS: dict[str, Callable[..., pl.Job]] = {
    "llama": llama,
    "gpt2": gpt2,
    "bert": bert,
    "t5": t5,
    "vit": vit,
    "mixtral": mixtral,
    "resnet": resnet,
    "unet": unet,
    "lstm": lstm,
    "mlp": mlp,
    "nano": nano,
    "encoder": encoder,
}
