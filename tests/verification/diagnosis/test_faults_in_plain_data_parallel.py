"""Faults planted in plain torch on several ranks are found at the right step and under the right name."""

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from paceline.job import Job
from paceline.verification.reference.reference import ReferenceConfig
from tests.verification.diagnosis.faulty_data_parallel import Bed, places


class Net(nn.Module):
    """Two layers, a norm, dropout; `spare` is never used."""

    def __init__(self, norm: bool, dropout: float) -> None:
        super().__init__()
        self.first = nn.Linear(6, 12)
        self.norm = nn.BatchNorm1d(12) if norm else nn.LayerNorm(12)
        self.dropout = nn.Dropout(dropout)
        self.second = nn.Linear(12, 4)
        self.spare = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.second(self.dropout(torch.tanh(self.norm(self.first(x)))))
        return hidden


def masked(output: torch.Tensor, batch: Any) -> Any:
    kept = batch[-1] >= 0
    return F.cross_entropy(output[kept], batch[-1][kept], reduction="sum"), kept.sum()


def two_terms(output: torch.Tensor, batch: Any) -> Any:
    total, count = masked(output, batch)
    return {"token": (total, count), "size": (output.square().sum(), len(output))}


def job_of(*, norm: bool = False, dropout: float = 0.0, terms: bool = False, samples: int = 40, seed: int = 1) -> Job:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, 6, generator=generator)
    y = torch.randint(-2, 4, (samples,), generator=generator)
    return Job(
        model=lambda: Net(norm, dropout).double(),
        loss=two_terms if terms else masked,
        count=(lambda batch: {"token": (batch[-1] >= 0).sum(), "size": len(batch[-1])}) if terms else None,
        train_data=torch.utils.data.TensorDataset(x.double(), y),
        optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=1e-2, weight_decay=0.01),
        global_batch_size=16,
    )


# the mistake: what verify must say, of which parameter, at which step
FAULTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "mean of rank means": ("mean of means: divided by each rank's own count", "", {}),
    "microbatch means": ("mean of means: divided by each microbatch's own count", "", {"micro": 3}),
    "one not reduced": (r"not reduced: rank 0's own gradient alone \(\d of 6: second", "second", {"layer": "second"}),
    "one rank missed the reduction": ("not reduced: rank 1's own gradient alone .*, on rank 1", "", {}),
    "one reduced twice": (r"a factor of 3: .*reduced twice.*\(2 of 6: first", "first", {"layer": "first"}),
    "all reduced twice": (r"a factor of 3: .*reduced twice.*every parameter", "", {}),
    "loss times ranks": ("a factor of 3: .*the loss multiplied by the ranks", "", {}),
    "divided by ranks again": ("a factor of 1/3: averaged over ranks", "", {}),
    "divided by ranks twice": ("a factor of 1/9: divided by the ranks twice", "", {}),
    "loss scaled": ("1.7 times what it should be: a scaled loss", "", {}),
    "sign": ("sign is wrong", "", {}),
    "never divided": ("never divided by the count", "", {}),
    "divided by samples": ("wrong denominator: divided by the 16 samples instead of the count", "", {}),
    "frozen on one rank": (r"missing on rank 1: frozen, detached or skipped there \(2 of 6", "first", {"layer": "first"}),
    "unequal initial weights": ("unequal initial weights on rank 1", "first.weight", {}),
    "same samples": ("data order: ranks read the same samples", r"\(data\)", {}),
    "same samples, unseen": ("data: the right samples with different contents", r"\(data\)", {}),
    "a sample dropped": (r"data order: samples were dropped \(\[\d+\]\)", r"\(data\)", {}),
    "a sample repeated": (r"data order: samples were repeated \(\[\d+\]\)", r"\(data\)", {}),
    "augmented twice": ("different contents in microbatch 1 .*augmentation", r"\(data\)", {}),
    "batchnorm local": ("ranks hold different values: running statistics of rank 0's .*only", "norm", {"norm": True}),
    "batchnorm of rank 0": ("buffers: running statistics of rank 0's microbatches only", "norm", {"norm": True}),
    "extra forward": ("folded twice", "norm", {"norm": True}),
    "equal dropout": ("random streams: .*all ranks draw equal numbers", "", {"dropout": 0.3}),
    "dropout by rank": ("random streams: without dropout the gradients agree", "", {"dropout": 0.3}),
    "stale parameters": ("the optimizer does not update it: .*stale", "", {}),
    "a group is missing": (r"the optimizer does not update it.*\(2 of 8\)", "norm", {"layer": "norm"}),
    "lr scaled": (r"the step is [\d.]+ times as long: a different learning rate", "", {}),
    "weight decay on one rank": ("a different weight decay or group .*on rank 1", "", {}),
    "weight decay in the gradient": ("weight decay was added to the gradient", "", {}),
    "clipped per rank": ("each rank's share has its own factor .*clipped per rank before the reduction", "", {}),
    "not divided by rounds": ("a factor of 2: accumulated without dividing", "", {"micro": 3}),
    "only the last microbatch": ("only the last microbatch of each rank counts: gradients overwritten", "", {"micro": 3}),
    "not set to zero": ("it still contains the previous step's gradient", "", {}),
    "unused as zeros": ("its gradient is zeros on rank 0 but none in one process", "spare", {}),
    "loss logged by rank 0 alone": ("reported loss is .* not summed over all ranks", r"\(loss\)", {}),
    "a term's local count": (
        "loss term 'token': a mean of means: divided by each rank's own count", "", {"terms": True, "layer": "token"}
    ),
    "wire in bf16": ("or different arithmetic", "", {}),
}  # fmt: skip


pytestmark = pytest.mark.usefixtures("single_thread")


def play(fault: str, *, ranks: int = 3, seed: int = 1, **given: Any) -> Any:
    layer, micro = given.pop("layer", ""), given.pop("micro", -(-16 // ranks))
    spec = ReferenceConfig(seed=seed, global_batch_size=16, micro_batch_size=micro, max_grad_norm=1.0)
    return Bed(job_of(seed=seed, **given), spec, ranks=ranks, fault=fault, layer=layer).run(places(40, 16, 3))


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_named(fault: str) -> None:
    cause, parameter, given = FAULTS[fault]
    rung_result = play(fault, **given)
    assert rung_result.verdict == "different"
    first = rung_result.first_difference
    assert re.search(cause, first["cause"]), first
    assert re.match(parameter, first["parameter"]), first
    assert first["step"] == (2 if fault == "not set to zero" else 1)


@pytest.mark.soak
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("ranks", [2, 4, 5])
@pytest.mark.parametrize("seed", range(6))
def test_planted_faults_are_named_whatever_the_ranks(fault: str, ranks: int, seed: int) -> None:
    """The number of ranks changes factors; the kind of cause stays."""
    cause, parameter, given = FAULTS[fault]
    rung_result = play(fault, ranks=ranks, seed=seed, **given)
    assert rung_result.verdict == "different"
    first = rung_result.first_difference
    kind = re.sub(r"\d/\d|\d+\.\d+|\d+", "N", cause)
    shown = re.sub(r"\d/\d+|\d+\.\d+|\d+", "N", first["cause"])
    assert re.search(kind.replace(r"\(N of N", r"\(N of N"), shown) or re.search(cause, first["cause"]), first
    assert re.match(parameter, first["parameter"]), first


@pytest.mark.parametrize("given", [{}, {"norm": True}, {"dropout": 0.3}, {"terms": True}, {"micro": 3}])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_the_same_loop_without_a_fault_is_equal(ranks: int, given: dict[str, Any]) -> None:
    rung_result = play("", ranks=ranks, **given)
    assert rung_result.first_difference is None, rung_result
    assert rung_result.max_difference < 1e-13
