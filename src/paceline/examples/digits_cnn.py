"""A small ConvNet with BatchNorm on scikit-learn's handwritten digits: bf16 on GPUs, a best checkpoint, early stopping.

paceline train digits_cnn.py --ranks 2
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import paceline as pl


def read_digits() -> tuple[TensorDataset, TensorDataset]:
    """Return 1,797 images of 8 x 8 pixels; every fifth is held out."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16.0
    labels = torch.tensor(digits.target, dtype=torch.long)
    held_out = torch.arange(len(labels)) % 5 == 0
    return (
        TensorDataset(images[~held_out], labels[~held_out]),
        TensorDataset(images[held_out], labels[held_out]),
    )


class ConvNet(nn.Module):
    def __init__(self, width: int, dropout: float):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, padding=1), nn.BatchNorm2d(2 * width), nn.ReLU(), nn.MaxPool2d(2),
        )  # fmt: skip
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(2 * width * 16, 10)

    def forward(self, images):
        return self.head(self.dropout(self.features(images).flatten(1)))


def loss(logits, batch):
    return F.cross_entropy(logits, batch[-1], reduction="sum"), len(batch[-1])


def accuracy(logits, batch):
    return (logits.argmax(-1) == batch[-1]).sum(), len(batch[-1])


def make_job(lr: float = 3e-3, width: int = 16, dropout: float = 0.1) -> pl.Job:
    train_data, eval_data = read_digits()
    return pl.Job(
        model=lambda: ConvNet(width, dropout),
        loss=loss,
        count=lambda batch: len(batch[-1]),
        train_data=train_data,
        eval_data=eval_data,
        optimizer=lambda named_parameters: torch.optim.AdamW([p for _, p in named_parameters], lr=lr),
        metrics={"accuracy": accuracy},
        global_batch_size=64,
        best="accuracy:max",
        early_stopping=5,
        settings={
            "train.epochs": 8,
            "train.precision": "bf16" if torch.cuda.is_available() else "fp32",
        },
    )
