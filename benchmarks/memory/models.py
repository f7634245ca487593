"""Models without a library behind them, as their users write them: pictures, sequences, rows of numbers."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Residual(nn.Module):
    """Two convolutions with BatchNorm beside a way around them; `stride` halves the picture."""

    def __init__(self, given: int, width: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(given, width, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)
        self.around = nn.Sequential()
        if stride != 1 or given != width:
            self.around = nn.Sequential(nn.Conv2d(given, width, 1, stride, bias=False), nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.first(x)), inplace=True)
        return F.relu(self.norm2(self.second(y)) + self.around(x), inplace=True)


class ResNet(nn.Module):
    """Four groups of `depth` residual blocks, each group twice as wide and half as large."""

    def __init__(self, width: int, depth: int, classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)
        )
        groups, given = [], width
        for number in range(4):
            wide = width * 2**number
            blocks = [Residual(given if i == 0 else wide, wide, 2 if i == 0 and number else 1) for i in range(depth)]
            groups.append(nn.Sequential(*blocks))
            given = wide
        self.groups = nn.Sequential(*groups)
        self.head = nn.Linear(given, classes)

    def forward(self, pictures: Tensor) -> Tensor:
        found: Tensor = self.head(F.adaptive_avg_pool2d(self.groups(self.stem(pictures)), 1).flatten(1))
        return found


def _twice(given: int, width: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(given, width, 3, padding=1), nn.GroupNorm(4, width), nn.SiLU(),
        nn.Conv2d(width, width, 3, padding=1), nn.GroupNorm(4, width), nn.SiLU(),
    )  # fmt: skip


class UNet(nn.Module):
    """Down and up again, with what was seen on the way down beside what comes up; a class for every pixel."""

    def __init__(self, width: int, depth: int, classes: int) -> None:
        super().__init__()
        wide = [width * 2**i for i in range(depth + 1)]
        self.down = nn.ModuleList(_twice(3 if i == 0 else wide[i - 1], wide[i]) for i in range(depth))
        self.middle = _twice(wide[-2], wide[-1])
        self.rise = nn.ModuleList(nn.ConvTranspose2d(wide[i + 1], wide[i], 2, 2) for i in reversed(range(depth)))
        self.up = nn.ModuleList(_twice(2 * wide[i], wide[i]) for i in reversed(range(depth)))
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        seen = []
        for block in self.down:
            seen.append(block(x))
            x = F.max_pool2d(seen[-1], 2)
        x = self.middle(x)
        for rise, block in zip(self.rise, self.up, strict=True):
            x = block(torch.cat([rise(x), seen.pop()], dim=1))
        found: Tensor = self.head(x)
        return found.permute(0, 2, 3, 1)


class Lstm(nn.Module):
    """Tokens through stacked LSTMs."""

    def __init__(self, vocabulary: int, width: int, depth: int, dropout: float) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, depth, batch_first=True, dropout=dropout)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = self.head(self.lstm(self.embed(ids))[0])
        return found


class Mlp(nn.Module):
    """Wide layers on rows of numbers: nearly all of its memory is weights."""

    def __init__(self, given: int, width: int, depth: int, classes: int) -> None:
        super().__init__()
        self.first = nn.Linear(given, width)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(depth))
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.first(x))
        for block in self.blocks:
            x = x + block(x)
        found: Tensor = self.head(x)
        return found


class Encoder(nn.Module):
    """torch's own TransformerEncoder over tokens, the mean of which tells the class."""

    def __init__(self, vocabulary: int, length: int, width: int, depth: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.place = nn.Parameter(torch.zeros(length, width))
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout, F.gelu, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = self.head(self.encoder(self.embed(ids) + self.place[: ids.shape[1]]).mean(1))
        return found


class NanoBlock(nn.Module):
    """Attention written out with a mask in a buffer, so that its scores are kept."""

    def __init__(self, width: int, heads: int, length: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, nn.Dropout(dropout)
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.c_fc, self.c_out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.register_buffer("mask", torch.tril(torch.ones(length, length)).view(1, 1, length, length))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.c_attn(self.ln_1(x)).split(width, dim=2)
        q, k, v = (part.view(batch, length, self.heads, -1).transpose(1, 2) for part in parts)
        scores = (q @ k.transpose(-2, -1)) * q.shape[-1] ** -0.5
        scores = scores.masked_fill(self.mask[:, :, :length, :length] == 0, float("-inf")).softmax(-1)
        seen = (self.dropout(scores) @ v).transpose(1, 2).reshape(batch, length, width)
        x = x + self.dropout(self.c_proj(seen))
        return x + self.dropout(self.c_out(F.gelu(self.c_fc(self.ln_2(x)))))


class Nano(nn.Module):
    """A small GPT with its embedding tied to its head."""

    def __init__(self, vocabulary: int, length: int, width: int, depth: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.h = nn.ModuleList(NanoBlock(width, heads, length, dropout) for _ in range(depth))
        self.ln_f, self.lm_head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1], device=ids.device))
        for block in self.h:
            x = block(x)
        found: Tensor = self.lm_head(self.ln_f(x))
        return found
