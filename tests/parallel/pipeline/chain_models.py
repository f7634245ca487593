"""Models to cut into pipeline stages, not written for it: tiny transformers configs and our own."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

IDS = torch.arange(28).reshape(4, 7) * 13 % 50
MASK = torch.ones(4, 7, dtype=torch.long)
MASK[1, 5:] = 0
SIZE = {"hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 32}


@dataclass(frozen=True)
class Case:
    make: Callable[[], nn.Module]
    loss: Callable[[nn.Module, int], Tensor]
    rounded: tuple[str, ...] = ()


class Block(nn.Module):
    def __init__(self, width: int, rate: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.drop = nn.Dropout(rate)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.mix(self.norm(x)))


class Nano(nn.Module):
    """Embeddings, a parameter of its own, blocks, a tied head: as nanoGPT has it."""

    def __init__(self, num_blocks: int = 4, rate: float = 0.2) -> None:
        super().__init__()
        self.tokens = nn.Embedding(50, 16)
        self.positions = nn.Parameter(torch.randn(9, 16))
        self.drop = nn.Dropout(rate)
        self.blocks = nn.ModuleList(Block(16, rate) for _ in range(num_blocks))
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 50, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.drop(self.tokens(ids) + self.positions[: ids.shape[1]])
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Pair(nn.Module):
    """Blocks that hand on a dict of tensors, a number and nothing, with an argument made outside by a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(_PairBlock() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        state = {"x": x, "more": (x * 2, None), "count": 0}
        bias = self.scale(torch.ones_like(x))
        for block in self.blocks:
            state = block(state, bias=bias)
        assert state["count"] == 4
        return state["x"] + state["more"][0]


class _PairBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, state: dict[str, Any], bias: Tensor) -> dict[str, Any]:
        y = torch.tanh(self.one(state["x"])) + bias
        return {"x": y, "more": (self.two(state["more"][0]) + y, None), "count": state["count"] + 1}


def _cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True), nn.Dropout2d(0.3), nn.BatchNorm2d(4), nn.Conv2d(4, 8, 3), nn.ReLU(inplace=True),
        nn.Dropout(0.2), nn.Flatten(), nn.Linear(8 * 12 * 12, 3),
    )  # fmt: skip


def _ids(microbatch: int) -> Tensor:
    """Other tokens and another length for each microbatch."""
    return (IDS[:, : 7 - microbatch % 2] + 3 * microbatch) % 50


def _pixels(microbatch: int, size: int = 16) -> Tensor:
    return torch.linspace(-1, 1, 2 * 3 * size * size).reshape(2, 3, size, size) * (1 + microbatch)


def _nano_loss(model: nn.Module, microbatch: int) -> Tensor:
    ids = _ids(microbatch)
    return F.cross_entropy(model(ids).flatten(0, 1), ids.flatten(), reduction="sum")


OWN: dict[str, Case] = {
    "nano": Case(Nano, _nano_loss),
    "pair": Case(Pair, lambda model, j: model(torch.linspace(-1, 1, 12).reshape(3, 4) * (j + 1)).square().sum()),
    "cnn": Case(_cnn, lambda model, j: model(_pixels(j)).square().mean()),
}


def _hf(name: str, **settings: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import transformers

        transformers.logging.set_verbosity_error()
        kind, _, _ = name.partition("For")
        config = getattr(transformers, f"{kind.removesuffix('LMHeadModel')}Config")(**settings)
        return getattr(transformers, name)(config)

    return make


def _text(model: nn.Module, microbatch: int) -> Tensor:
    ids = _ids(microbatch).contiguous()
    return model(input_ids=ids, attention_mask=MASK[:, : ids.shape[1]], labels=ids).loss


def _image(model: nn.Module, microbatch: int) -> Tensor:
    return model(pixel_values=_pixels(microbatch, 32), labels=torch.tensor([0, 2])).loss


_LLAMA = {"vocab_size": 50, "num_key_value_heads": 2, "attention_dropout": 0.1, **SIZE}
HF: dict[str, Case] = {
    "llama": Case(_hf("LlamaForCausalLM", **_LLAMA), _text),
    "llama-tied": Case(_hf("LlamaForCausalLM", tie_word_embeddings=True, **_LLAMA), _text),
    "gpt2": Case(_hf("GPT2LMHeadModel", vocab_size=50, n_embd=16, n_layer=4, n_head=2, bos_token_id=1, eos_token_id=2), _text),
    "bert": Case(_hf("BertForMaskedLM", vocab_size=50, **SIZE), _text),
    "vit": Case(_hf("ViTForImageClassification", image_size=32, patch_size=16, num_labels=3, **SIZE), _image),
    "mixtral": Case(_hf("MixtralForCausalLM", vocab_size=50, num_key_value_heads=2, num_local_experts=4, **SIZE), _text),
    "t5": Case(
        _hf("T5ForConditionalGeneration", vocab_size=50, d_model=16, d_kv=8, d_ff=32, num_layers=3, num_heads=2,
            decoder_start_token_id=0, pad_token_id=0),
        _text, rounded=("shared.weight",),
    ),
}  # fmt: skip
CASES = {**OWN, **HF}


def built(name: str) -> nn.Module:
    """The start weights of one plain build, in training mode."""
    torch.manual_seed(0)
    return CASES[name].make().train()
