"""Verify models that no test has, in the style of public scripts, under ddp, fsdp, pp and tp.

    python benchmarks/foreign_models.py [--only NAME ...] [--layouts ddp fsdp pp tp] [--write FILE]

Each cell is one `paceline verify`: equal (bitwise or rounding), refused with the reason, different, or crashed.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import torch
import torch.nn.functional as F
from foreign_networks import (
    DETR,
    DLRM,
    LSTMLM,
    VAE,
    Conformer,
    GraphNet,
    Mamba,
    Mixer,
    NanoGPT,
    PointNet,
    ResNet,
    RetNet,
    UNet,
    WaveNet,
)
from torch import Tensor, nn

import paceline as pl

LAYOUTS = ("ddp", "fsdp", "pp", "tp")


class Samples(torch.utils.data.Dataset):
    """32 samples that a function makes of a seeded generator."""

    def __init__(self, make):
        self.make = make

    def __len__(self):
        return 32

    def __getitem__(self, index):
        return self.make(torch.Generator().manual_seed(index))


def tokens(g):
    ids = torch.randint(0, 40, (13,), generator=g)
    return ids[:-1], ids[1:]


def images(g):
    return torch.randn(3, 16, 16, generator=g), torch.randint(0, 5, (), generator=g)


def pixels(g):
    return torch.randn(3, 16, 16, generator=g), torch.randint(0, 5, (16, 16), generator=g)


def vectors(g):
    x = torch.randn(12, generator=g)
    return x, x


def points(g):
    return torch.randn(3, 20, generator=g), torch.randint(0, 5, (), generator=g)


def speech(g):
    return torch.randn(24, 10, generator=g), torch.randint(0, 5, (24,), generator=g)


def clicks(g):
    return torch.randn(4, generator=g), torch.randint(0, 30, (3,), generator=g), torch.randint(0, 2, (), generator=g)


def classes(output, batch):
    logits = (
        output
        if output.dim() == 2
        else output.flatten(0, 1)
        if output.dim() == 3
        else output.movedim(1, -1).flatten(0, 2)
    )
    return F.cross_entropy(logits, batch[-1].flatten(), reduction="sum"), batch[-1].numel()


def squares(output, batch):
    return (output - batch[-1]).square().sum(), batch[-1].numel()


def hf(name, **config):
    """A model of transformers from its configuration; it computes no loss here."""

    def build():
        import transformers

        small = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        kind = getattr(transformers, f"{name.partition('For')[0].removesuffix('LMHeadModel')}Config")
        return getattr(transformers, name)(kind(**{**small, **config}))

    return build


LAYERS = {"num_hidden_layers": 4, "num_attention_heads": 2}
DECODER = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 32, **LAYERS}
VISION = {"num_labels": 5, "image_size": 16, "patch_size": 4, "num_channels": 3}
STEPS = {"num_labels": 5, "depths": [1, 1, 1, 1], "hidden_sizes": [8, 16, 24, 32]}
HEADS = {**STEPS, "num_attention_heads": [1, 2, 2, 4], "sr_ratios": [2, 1, 1, 1], "drop_path_rate": 0.0}
SEGFORMER = {**HEADS, "decoder_hidden_size": 16, "classifier_dropout_prob": 0.0}
SWIN = {**VISION, "embed_dim": 8, "depths": [2, 2], "num_heads": [2, 4], "window_size": 2, "drop_path_rate": 0.0}
OPT = {"vocab_size": 40, "hidden_size": 16, "word_embed_proj_dim": 16, "ffn_dim": 32, "dropout": 0.0, **LAYERS}
BLOOM = {"vocab_size": 40, "hidden_size": 16, "n_layer": 4, "n_head": 2}
BLOOM |= {"hidden_dropout": 0.0, "attention_dropout": 0.0}
DEIT = {**VISION, "hidden_size": 16, "intermediate_size": 32, **LAYERS}
MODELS = {
    "nanoGPT": (NanoGPT, tokens, classes),
    "ResNet": (ResNet, images, classes),
    "U-Net": (UNet, pixels, classes),
    "WaveNet": (WaveNet, tokens, classes),
    "PointNet": (PointNet, points, classes),
    "GNN": (GraphNet, points, classes),
    "VAE": (VAE, vectors, squares),
    "LSTM": (LSTMLM, tokens, classes),
    "GRU": (lambda: LSTMLM(nn.GRU), tokens, classes),
    "DLRM": (DLRM, clicks, classes),
    "Mamba": (Mamba, tokens, classes),
    "RetNet": (RetNet, tokens, classes),
    "Mixer": (Mixer, images, classes),
    "Conformer": (Conformer, speech, classes),
    "DETR": (DETR, images, classes),
    "SegFormer": (hf("SegformerForSemanticSegmentation", **SEGFORMER), pixels, classes),
    "Swin": (hf("SwinForImageClassification", **SWIN), images, classes),
    "ConvNeXt": (hf("ConvNextForImageClassification", patch_size=2, **STEPS), images, classes),
    "PVT": (hf("PvtV2ForImageClassification", image_size=16, **HEADS), images, classes),
    "DeiT": (hf("DeiTForImageClassification", **DEIT), images, classes),
    "Qwen2": (hf("Qwen2ForCausalLM", **DECODER, num_key_value_heads=2), tokens, classes),
    "GPTNeoX": (hf("GPTNeoXForCausalLM", **DECODER), tokens, classes),
    "OPT": (hf("OPTForCausalLM", **OPT), tokens, classes),
    "Bloom": (hf("BloomForCausalLM", **BLOOM), tokens, classes),
}


def make_job(model: str = "nanoGPT") -> pl.Job:
    """One of the models, as a job."""
    build, make, loss = MODELS[model]

    def forward(net: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        output = net(*batch[:-1])
        output = getattr(output, "logits", output)
        if model == "SegFormer":
            output = F.interpolate(output, size=batch[-1].shape[-2:], mode="bilinear", align_corners=False)
        return output

    return pl.Job(
        model=build,
        loss=loss,
        forward=forward,
        train_data=Samples(make),
        optimizer=lambda named: torch.optim.AdamW(named, lr=1e-3),
        global_batch_size=8,
    )


def cell(model: str, layout: str, folder: Path) -> dict[str, str]:
    """What verify says of one model under one layout."""
    command = [sys.executable, "-W", "ignore", "-m", "paceline", "verify", f"{Path(__file__).resolve()}:make_job"]
    command += ["--layout", layout, "--ranks", "2", "--job.model", model, "--json", "--steps", "2"]
    try:
        ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240, check=False)
    except subprocess.TimeoutExpired:
        return {"model": model, "layout": layout, "state": "crashed", "why": "no end in 240 s"}
    try:
        found = json.loads(ended.stdout[ended.stdout.index("{") :])
    except ValueError:
        found = {"what": (ended.stdout + ended.stderr)[-300:]}
    state = found.get("verdict") or (
        "refused" if found.get("error") in ("LayoutError", "JobError", "UsageError") else "crashed"
    )
    why = "" if "verdict" in found else str(found.get("what", "")).partition("\n")[0]
    return {"model": model, "layout": layout, "state": state, "why": why or str(found.get("first_difference") or "")}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", default=list(MODELS))
    parser.add_argument("--layouts", nargs="+", default=list(LAYOUTS))
    parser.add_argument("--write")
    asked = parser.parse_args()
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for model in asked.only:
            for layout in asked.layouts:
                found.append(cell(model, layout, Path(folder)))
                one = found[-1]
                print(f"{one['model']:10} {one['layout']:5} {one['state']:9} {one['why']}", flush=True)
                if asked.write:
                    Path(asked.write).write_text(json.dumps(found, indent=1))
    counts = Counter(one["state"] for one in found)
    print("  ".join(f"{state}: {number}" for state, number in sorted(counts.items())), f"of {len(found)}")
    return 1 if counts["different"] or counts["crashed"] else 0


if __name__ == "__main__":
    sys.exit(main())
