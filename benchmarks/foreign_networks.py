"""Small networks in the style of public training scripts, one class each, for `foreign_models.py`."""

import math

import torch
import torch.nn.functional as F
from torch import nn


class NanoGPT(nn.Module):
    """Blocks in a ModuleDict, as karpathy/nanoGPT has them, with a tied head."""

    class Block(nn.Module):
        def __init__(self, width, heads):
            super().__init__()
            self.ln_1, self.ln_2, self.heads = nn.LayerNorm(width), nn.LayerNorm(width), heads
            self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.c_fc, self.c_out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x):
            b, t, c = x.shape
            q, k, v = self.c_attn(self.ln_1(x)).split(c, dim=2)
            q, k, v = (each.view(b, t, self.heads, c // self.heads).transpose(1, 2) for each in (q, k, v))
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).contiguous().view(b, t, c)
            x = x + self.c_proj(y)
            return x + self.c_out(F.gelu(self.c_fc(self.ln_2(x))))

    def __init__(self):
        super().__init__()
        blocks = nn.ModuleList(self.Block(16, 2) for _ in range(4))
        self.transformer = nn.ModuleDict({"wte": nn.Embedding(40, 16), "wpe": nn.Embedding(12, 16), "h": blocks})
        self.lm_head = nn.Linear(16, 40, bias=False)
        self.transformer.wte.weight = self.lm_head.weight

    def forward(self, ids):
        x = self.transformer.wte(ids) + self.transformer.wpe(torch.arange(ids.shape[1], device=ids.device))
        for block in self.transformer.h:
            x = block(x)
        return self.lm_head(x)


class ResNet(nn.Module):
    """layer1 to layer4 of basic blocks."""

    class Basic(nn.Module):
        def __init__(self, inside, outside, stride):
            super().__init__()
            self.conv1, self.bn1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False), nn.BatchNorm2d(outside)
            self.conv2, self.bn2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False), nn.BatchNorm2d(outside)
            self.down = nn.Conv2d(inside, outside, 1, stride) if stride > 1 else None

        def forward(self, x):
            skip = x if self.down is None else self.down(x)
            x = F.relu(self.bn1(self.conv1(x)))
            return F.relu(self.bn2(self.conv2(x)) + skip)

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, 1, 1)
        self.layer1 = nn.Sequential(self.Basic(8, 8, 1), self.Basic(8, 8, 1))
        self.layer2 = nn.Sequential(self.Basic(8, 16, 2), self.Basic(16, 16, 1))
        self.layer3 = nn.Sequential(self.Basic(16, 32, 2), self.Basic(32, 32, 1))
        self.fc = nn.Linear(32, 5)

    def forward(self, x):
        return self.fc(self.layer3(self.layer2(self.layer1(self.stem(x)))).mean((2, 3)))


class UNet(nn.Module):
    """Two ModuleLists, down and up, with skips between them."""

    def __init__(self):
        super().__init__()
        pair = lambda a, b: nn.Sequential(nn.Conv2d(a, b, 3, 1, 1), nn.GroupNorm(2, b), nn.SiLU())  # noqa: E731
        self.down = nn.ModuleList([pair(3, 8), pair(8, 16), pair(16, 32)])
        self.up = nn.ModuleList([pair(48, 16), pair(24, 8)])
        self.last = nn.Conv2d(8, 5, 1)

    def forward(self, x):
        skips = []
        for step in self.down:
            x = step(x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = skips.pop()
        for step in self.up:
            x = step(torch.cat([F.interpolate(x, scale_factor=2), skips.pop()], 1))
        return self.last(x)


class WaveNet(nn.Module):
    """Dilated convolutions whose skips are added up."""

    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Embedding(40, 16), nn.Conv1d(16, 40, 1)
        self.gates = nn.ModuleList(nn.Conv1d(16, 32, 2, dilation=2**n) for n in range(4))
        self.mixes = nn.ModuleList(nn.Conv1d(16, 16, 1) for _ in range(4))

    def forward(self, ids):
        x, total = self.embed(ids).transpose(1, 2), 0.0
        for n, (gate, mix) in enumerate(zip(self.gates, self.mixes, strict=True)):
            a, b = gate(F.pad(x, (2**n, 0))).chunk(2, 1)
            found = mix(torch.tanh(a) * torch.sigmoid(b))
            x, total = x + found, total + found
        return self.out(F.relu(total)).transpose(1, 2)


class PointNet(nn.Module):
    """A shared network for each point, a maximum over points, and a learned rotation."""

    def __init__(self):
        super().__init__()
        self.turn = nn.Sequential(
            nn.Conv1d(3, 16, 1), nn.ReLU(), nn.AdaptiveMaxPool1d(1), nn.Flatten(), nn.Linear(16, 9)
        )
        self.each = nn.Sequential(nn.Conv1d(3, 32, 1), nn.BatchNorm1d(32), nn.ReLU(), nn.Conv1d(32, 64, 1))
        self.head = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 5))

    def forward(self, x):
        x = (self.turn(x).view(-1, 3, 3) + torch.eye(3)) @ x
        return self.head(self.each(x).amax(-1))


class GraphNet(nn.Module):
    """Messages by index_add over a ring of nodes in each sample."""

    def __init__(self):
        super().__init__()
        self.enter, self.head = nn.Linear(3, 16), nn.Linear(16, 5)
        self.message, self.update = (nn.ModuleList(nn.Linear(32, 16) for _ in range(3)) for _ in range(2))

    def forward(self, x):
        x = self.enter(x.transpose(1, 2))
        source = torch.arange(x.shape[1])
        target = (source + 1) % x.shape[1]
        for message, update in zip(self.message, self.update, strict=True):
            sent = F.relu(message(torch.cat([x[:, source], x[:, target]], -1)))
            got = torch.zeros_like(x).index_add(1, target, sent)
            x = x + F.relu(update(torch.cat([x, got], -1)))
        return self.head(x.mean(1))


class VAE(nn.Module):
    """Encoder, a draw, decoder."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 8))
        self.decoder = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 12))

    def forward(self, x):
        mean, log = self.encoder(x).chunk(2, -1)
        return self.decoder(mean + torch.randn_like(mean) * (0.5 * log).exp() * 0.1)


class LSTMLM(nn.Module):
    """pytorch/examples' word language model."""

    def __init__(self, kind=nn.LSTM):
        super().__init__()
        self.encoder, self.rnn, self.decoder = nn.Embedding(40, 16), kind(16, 16, 2, dropout=0.2), nn.Linear(16, 40)
        self.decoder.weight = self.encoder.weight

    def forward(self, ids):
        return self.decoder(self.rnn(self.encoder(ids.t()))[0]).transpose(0, 1)


class DLRM(nn.Module):
    """Embeddings of clicks, and their products."""

    def __init__(self):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(30, 8) for _ in range(3))
        self.bottom = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8))
        self.top = nn.Sequential(nn.Linear(14, 16), nn.ReLU(), nn.Linear(16, 2))

    def forward(self, dense, ids):
        x = self.bottom(dense)
        each = torch.stack([x, *(table(ids[:, n]) for n, table in enumerate(self.tables))], 1)
        rows, columns = torch.tril_indices(4, 4, -1)
        return self.top(torch.cat([x, (each @ each.mT)[:, rows, columns]], 1))


class Mamba(nn.Module):
    """A selective scan, written as a loop."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.enter, self.leave = nn.LayerNorm(16), nn.Linear(16, 64), nn.Linear(32, 16)
            self.conv, self.select = nn.Conv1d(32, 32, 3, groups=32, padding=2), nn.Linear(32, 9)
            self.decay = nn.Parameter(torch.arange(1.0, 5.0).log().repeat(32, 1))

        def forward(self, x):
            u, gate = self.enter(self.norm(x)).chunk(2, -1)
            u = F.silu(self.conv(u.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2))
            step, b, c = self.select(u).split((1, 4, 4), -1)
            step, state, found = F.softplus(step), 0.0, []
            for t in range(x.shape[1]):
                keep = torch.exp(-step[:, t, :, None] * self.decay.exp())
                state = keep * state + step[:, t, :, None] * b[:, t, None] * u[:, t, :, None]
                found.append((state * c[:, t, None]).sum(-1))
            return x + self.leave(torch.stack(found, 1) * F.silu(gate))

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(40, 16), nn.Linear(16, 40)
        self.layers = nn.ModuleList(self.Block() for _ in range(2))

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class RetNet(nn.Module):
    """Retention: products with a decay of the distance, no softmax."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.qkv, self.out = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)
            self.mlp = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))

        def forward(self, x):
            q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
            far = torch.arange(x.shape[1])[:, None] - torch.arange(x.shape[1])
            decay = torch.where(far >= 0, 0.9 ** far.clamp(min=0), 0.0)
            x = x + self.out((q @ k.mT * decay) @ v / math.sqrt(16))
            return x + self.mlp(x)

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(40, 16), nn.Linear(16, 40)
        self.layers = nn.Sequential(*(self.Block() for _ in range(3)))

    def forward(self, ids):
        return self.head(self.layers(self.embed(ids)))


class Mixer(nn.Module):
    """MLP-Mixer: products over patches, then over channels."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.LayerNorm(16), nn.LayerNorm(16)
            self.across = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
            self.within = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))

        def forward(self, x):
            x = x + self.across(self.one(x).mT).mT
            return x + self.within(self.two(x))

    def __init__(self):
        super().__init__()
        self.patch, self.head = nn.Conv2d(3, 16, 4, 4), nn.Linear(16, 5)
        self.blocks = nn.ModuleList(self.Block() for _ in range(4))

    def forward(self, x):
        x = self.patch(x).flatten(2).mT
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


class Conformer(nn.Module):
    """Attention and a depthwise convolution in one block."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.feed, self.last = nn.Sequential(nn.Linear(16, 32), nn.SiLU(), nn.Linear(32, 16)), nn.LayerNorm(16)
            self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
            self.gate, self.depth, self.norm = (
                nn.Conv1d(16, 32, 1),
                nn.Conv1d(16, 16, 5, padding=2, groups=16),
                nn.BatchNorm1d(16),
            )

        def forward(self, x):
            x = x + 0.5 * self.feed(x)
            x = x + self.attention(x, x, x, need_weights=False)[0]
            x = x + F.silu(self.norm(self.depth(F.glu(self.gate(x.transpose(1, 2)), 1)))).transpose(1, 2)
            return self.last(x)

    def __init__(self):
        super().__init__()
        self.enter, self.head = nn.Linear(10, 16), nn.Linear(16, 5)
        self.blocks = nn.ModuleList(self.Block() for _ in range(3))

    def forward(self, x):
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class DETR(nn.Module):
    """A convolution, an encoder and a decoder with learned queries."""

    def __init__(self):
        super().__init__()
        self.stem, self.queries = (
            nn.Conv2d(3, 16, 4, 4),
            nn.Parameter(torch.randn(4, 16, generator=torch.Generator().manual_seed(0))),
        )
        self.transformer = nn.Transformer(16, 2, 2, 2, 32, 0.0, batch_first=True)
        self.head = nn.Linear(16, 5)

    def forward(self, x):
        seen = self.stem(x).flatten(2).mT
        return self.head(self.transformer(seen, self.queries.expand(len(x), -1, -1))).mean(1)
