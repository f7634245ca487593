"""A Hugging Face Llama from a config, with the model's own loss, on the source text of Python's standard library.

pip install paceline[hf]
paceline train hf_llama.py --ranks 2
"""

import sysconfig
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig

import paceline as pl


class Bytes(Dataset):
    """Windows of bytes as `input_ids` and `labels`; the model shifts the labels itself."""

    def __init__(self, length: int, held_out: bool):
        root = Path(sysconfig.get_paths()["stdlib"])
        files = sorted(root.glob("*.py"))
        text = b"".join(path.read_bytes() for i, path in enumerate(files) if (i % 16 == 0) == held_out)
        self.ids = torch.tensor(list(text[:400_000]), dtype=torch.long)
        self.length, self.max_windows = length, 200 if held_out else 4000

    def __len__(self):
        return min(self.max_windows, len(self.ids) // self.length)

    def __getitem__(self, index):
        ids = self.ids[index * self.length : (index + 1) * self.length]
        return {"input_ids": ids, "labels": ids}


def make_job(lr: float = 1e-3, width: int = 64, depth: int = 2, context: int = 64) -> pl.Job:
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=depth,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=context,
        tie_word_embeddings=True,
    )
    return pl.hf.job(  # a model's folder instead of the config also loads its weights and tokenizer
        config,
        train_data=lambda: Bytes(context, held_out=False),
        eval_data=lambda: Bytes(context, held_out=True),
        optimizer=lambda named_parameters: torch.optim.AdamW([p for _, p in named_parameters], lr=lr),
        global_batch_size=32,
        max_grad_norm=1.0,
        settings={"train.steps": 60},
    )
