"""verify's messages on jobs that it cannot compare in full: no bare traceback and no false alarm."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from paceline.errors import JobError
from paceline.parallel.module_access.parameters import NamedParameter
from paceline.step.optimizer_update import OptimizerUpdate
from paceline.verification.precision_cast import cast_model
from paceline.verification.reference.whole_batch import merge_microbatches, merge_with_one_attached
from paceline.verification.tensor_distance import euclidean_distance
from tests.verification.test_detection_thresholds import Net, job_of, verify

SHORT = TensorDataset(torch.randn(25, 6, generator=torch.Generator().manual_seed(3)), torch.arange(25) % 4)


pytestmark = pytest.mark.usefixtures("single_thread")


def said(answer: dict[str, Any]) -> str:
    assert answer["verdict"] in ("bitwise", "rounding"), answer["lines"]
    return "\n".join(answer["lines"])


class Mixing(nn.Module):
    """A layer that runs only where a microbatch has several samples."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.mix, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        if len(x) > 1:
            h = h + self.mix(h.mean(0, keepdim=True))
        found: Tensor = self.last(h)
        return found


class Keeping(nn.Module):
    """A hidden state that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.state = nn.Linear(6, 4), torch.ones(())

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layer(x) * self.state
        self.state = 1.0 + found.detach().square().mean()
        return found


class Turned(nn.Module):
    """A complex table, and a mask with an infinity, in buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 8)
        self.register_buffer("turns", torch.polar(torch.ones(4), torch.arange(4.0)), persistent=False)
        self.register_buffer("mask", torch.tensor([0.0, 0.0, float("-inf"), 0.0]))

    def forward(self, x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(self.layer(x).unflatten(-1, (4, 2)).contiguous())
        found: Tensor = (pairs * self.turns).imag + self.mask.exp()
        return found


class Centres(nn.Module):
    """A loss with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.W = nn.Parameter(torch.ones(4, 4))

    def forward(self, output: Tensor, batch: Any) -> Any:
        return F.cross_entropy(output @ self.W, batch[1], reduction="sum"), len(output)


class Weighted(nn.Module):
    """A loss with class weights in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0, 4.0]), reduction="sum")

    def forward(self, output: Tensor, batch: Any) -> Any:
        return self.loss(output, batch[1]), len(output)


def test_parts_without_a_gradient_are_a_warning_that_does_not_ask_for_what_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = said(verify(replace(job_of(), model=Mixing), None, monkeypatch))
    assert "although loss= returns (sum, count)" in text and "Hint: loss=(sum, count)" not in text
    assert "in microbatches of 4: " in text


def test_a_state_is_no_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = verify(replace(job_of(), model=Keeping), None, monkeypatch)
    assert "keeps state from one forward to the next" in answer["rungs"][0]["detail"]
    assert "random" not in answer["rungs"][0]["detail"]


def test_complex_tables_are_compared_in_both_their_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    job = replace(job_of(), model=Turned)
    answer = verify(job, None, monkeypatch)
    assert said(answer) and [rung["name"] for rung in answer["rungs"]][1] == "lockstep in float64"

    def spoil(built: Any) -> None:
        built.model.turns.imag.mul_(1.001)

    spoilt = verify(job, spoil, monkeypatch)
    assert spoilt["first_difference"] == {**spoilt["first_difference"], "parameter": "turns", "step": 1}


@pytest.mark.parametrize("is_closure", [False, True])
def test_parameters_of_the_loss_are_named(is_closure: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    centres = Centres()
    job = job_of(loss=(lambda output, batch: centres(output, batch)) if is_closure else centres)
    text = said(verify(job, None, monkeypatch))
    assert f"not covered: {'a parameter [4, 4]' if is_closure else 'Centres.W'} of the loss" in text
    assert text.endswith("except what is not covered")


def test_class_weights_are_in_float64_too(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [rung["name"] for rung in verify(job_of(loss=Weighted()), None, monkeypatch)["rungs"]]
    assert "lockstep in float64" in names


def two_terms(mark: float) -> Any:
    def loss(output: Tensor, batch: Any) -> Any:
        rare = (batch[1] > 5).float()
        return {
            "often": (F.cross_entropy(output, batch[1], reduction="sum"), len(output)),
            "rarely": ((output.square().mean(1) * rare).sum() * mark, rare.sum()),
        }

    return loss


def counts(batch: Any) -> Any:
    return {"often": len(batch[1]), "rarely": (batch[1] > 5).sum()}


def test_a_term_without_a_target_is_said_and_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    text = said(verify(job_of(loss=two_terms(1.0), count=counts), None, monkeypatch))
    assert "Step 1 has no target of rarely: train stops there" in text and "step 1 and later" in text


def test_where_nothing_is_finite_nothing_was_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = verify(job_of(loss=two_terms(float("nan")), count=counts), None, monkeypatch)
    assert answer["verdict"] == "undecided"
    text = "\n".join(answer["lines"])
    assert "its counts are 8 of often, 0 of rarely" in text
    assert "no compared step has a finite gradient" in text
    assert text.endswith("UNDECIDED: nothing could be compared with one process, for the reason above")


def correct(output: Tensor, batch: Any) -> Tensor:
    return (output.argmax(1) == batch[1]).float()


@pytest.mark.parametrize(
    ("metric", "warns"),
    [
        (lambda output, batch: (correct(output, batch).mean(), len(output)), True),
        (lambda output, batch: (correct(output, batch).mean() ** 2 * len(output), len(output)), True),
        (lambda output, batch: (correct(output, batch).sum(), len(output)), False),
    ],
    ids=["mean with a count", "square of a mean", "sum"],
)
def test_a_metric_that_is_no_sum_over_samples_is_warned_about(
    monkeypatch: pytest.MonkeyPatch, metric: Any, warns: bool
) -> None:
    answer = verify(replace(job_of(), metrics={"accuracy": metric}), None, monkeypatch)
    text = said(answer)
    assert ("metric accuracy is not a sum over samples" in text) == warns, text
    assert "a different micro_batch_size changes the training" not in text


def test_fp16_gradients_that_overflow_at_the_usual_scale_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    def large(output: Tensor, batch: Any) -> Any:
        return (output.float() * 300.0).square().sum() + 3e3 * output.float().sum(), len(output)

    job = job_of(loss=large, count=lambda batch: len(batch[1]), lr=1e-6)
    answer = verify(job, None, monkeypatch, **{"train.precision": "fp16"})
    assert said(answer).endswith("bitwise (bit for bit)")
    assert answer["rungs"][-1]["compared"]["weights"] == 6


def test_a_short_batch_that_one_process_can_not_run_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    job = replace(job_of(), model=lambda: Net(torch.float32, True), train_data=SHORT, micro_batch_size=None)
    with pytest.raises(JobError, match=r"step 4, the last that would be compared, .*more than 1 value"):
        verify(job, None, monkeypatch)
    assert "train.steps=2 does not reach" in said(verify(job, None, monkeypatch, **{"train.steps": 2}))
    assert said(verify(job, None, monkeypatch, **{"data.drop_last": True}))


class Noisy(torch.utils.data.Dataset[Any]):
    """An augmentation that a split for evaluation should not have."""

    def __len__(self) -> int:
        return 17

    def __getitem__(self, index: int) -> Any:
        return torch.full((6,), float(index)) + torch.rand(6), index % 4


def test_a_metric_of_random_numbers_is_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    def drawing(model: nn.Module, batch: Any) -> Any:
        return model(batch[0] + (0.0 if model.training else torch.rand(())))

    for job in (replace(job_of(), eval_data=Noisy()), replace(job_of(), forward=drawing)):
        answer = verify(job, lambda built: torch.rand(1) and None, monkeypatch)
        assert said(answer)


def test_distances_of_every_type() -> None:
    one = torch.tensor([1.0 + 1.0j, 2.0])
    assert euclidean_distance(one, torch.tensor([1.0 + 4.0j, 2.0 + 4.0j])) == 5.0
    assert euclidean_distance(one.conj(), one) == 2.0
    infinite = torch.tensor([float("inf"), float("nan"), 1.0])
    assert euclidean_distance(infinite, infinite.clone()) == 0.0
    assert not euclidean_distance(infinite, torch.tensor([float("inf"), 0.0, 1.0])) <= 1e300
    assert not euclidean_distance(infinite, torch.tensor([float("-inf"), float("nan"), 1.0])) <= 1e300
    assert euclidean_distance(torch.tensor([True, False]), torch.tensor([True, True])) == 1.0
    assert euclidean_distance(torch.eye(2).to_sparse(), torch.zeros(2, 2).to_sparse()) == pytest.approx(2**0.5)


def test_a_model_in_float64_keeps_its_ties_and_its_complex_numbers() -> None:
    model = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3, bias=False), "c": Turned(), "d": nn.LSTM(2, 2)})
    model["b"].weight.data = model["a"].weight.data.t()
    model["c"].register_buffer("part", model["c"].turns[1:3])
    right = {name: value.clone() for name, value in model.state_dict().items()}
    out = cast_model(model, torch.float64)["d"](torch.ones(1, 1, 2, dtype=torch.float64))[0]
    assert out.dtype is torch.float64
    assert model["c"].turns.dtype is torch.complex128 and model["c"].mask.dtype is torch.float64
    for name, value in model.state_dict().items():
        assert euclidean_distance(value, right[name]) == 0.0, name
    with torch.no_grad():
        model["a"].weight[0, 1] = 7.0
        model["c"].turns[2] = 5.0j
    assert float(model["b"].weight[1, 0].detach()) == 7.0 and complex(model["c"].part[1]) == 5.0j


def test_lists_beside_tensors_are_joined_where_microbatches_are() -> None:
    parts = [{"x": torch.ones(n), "texts": ["a"] * n, "pair": (torch.ones(n), "k"), "none": None} for n in (2, 3)]
    one = merge_microbatches(parts, [2, 3], lambda: None)
    assert one["texts"] == ["a"] * 5 and len(one["x"]) == 5 and one["pair"][1] == "k"
    assert merge_with_one_attached(parts, attached_index=1, sizes=[2, 3])["texts"] == ["a"] * 5
    other = [*parts[:1], {**parts[1], "none": 3}]
    assert merge_microbatches(other, [2, 3], lambda: "read anew") == "read anew"


def test_one_norm_for_gradients_of_half_precision() -> None:
    """As `place.norm` measures pieces: three digits of bfloat16 would clip by another factor."""
    draw = torch.Generator().manual_seed(0)
    gradients = [torch.randn(500, generator=draw).bfloat16() for _ in range(9)]
    parameters = [nn.Parameter(torch.zeros(500, dtype=torch.bfloat16)) for _ in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.clone()
    named = [NamedParameter(index=n, name=f"p{n}", parameter=parameter) for n, parameter in enumerate(parameters)]
    update = update_of(named)
    wanted = float(torch.cat(gradients).double().norm())
    norm, _ = update.commit(step=1, loss=1.0)
    assert norm is not None and abs(float(norm) - wanted) < 1e-12 * wanted
    assert abs(float(torch.nn.utils.get_total_norm(gradients)) - wanted) > 1e-4 * wanted  # what it was


def update_of(named: list[NamedParameter]) -> OptimizerUpdate:
    return OptimizerUpdate(
        named_parameters=named,
        optimizers=[torch.optim.SGD([member.parameter for member in named], lr=0.0)],
        lr_schedulers=[],
        scaler=None,
        max_grad_norm=1.0,
        check_finite=True,
        skip_nonfinite=False,
        ema=None,
    )
