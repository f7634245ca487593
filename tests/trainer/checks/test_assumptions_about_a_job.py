"""What a run assumes about a job and checks: frozen layers, losses, optimizer state, attributes."""

import json
import math
import re
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import paceline as pl
from paceline.checkpoint.optimizer_options import factory_options
from paceline.checkpoint.pipedream_state import StashedWeightsState
from paceline.checkpoint.unsaved_state_warnings import UntrackedStateWarning
from paceline.comm.process_group import World
from paceline.errors import CheckpointError, JobError, PacelineError, UsageError
from paceline.parallel.module_access.parameters import trainable_parameters
from paceline.parallel.module_access.shard_spec import ShardSpec
from paceline.parallel.module_access.sharded_tensors import LocalTensor, ShardedTensors
from paceline.schedule.weight_version_rules import Rule, VersionRule
from paceline.step.loss.loss_return_value import LossContract
from paceline.step.loss.modules_captured_by_loss import find_parameters
from paceline.step.pipedream.pipedream_step import PipeDreamStep
from paceline.step.pipedream.weight_versions import WeightVersions
from paceline.trainer.checks.loss_modules import loss_notes
from paceline.trainer.setup.optimizers import make_scaler
from tests.trainer.test_edge_cases_of_a_run import job, rows, trained
from tests.trainer.test_save_before_evaluation import Ranks


class Thawing(nn.Module):
    """Its trunk thaws in the third forward, and trains from the beginning where it `trains`."""

    def __init__(self, trains: bool) -> None:
        super().__init__()
        self.trunk, self.head, self.calls, self.trains = nn.Linear(4, 6), nn.Linear(6, 2), 0, trains
        self.trunk.requires_grad_(trains)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        if self.trains and self.calls == 1:
            self.trunk.requires_grad_(False)
        if self.calls == 3:
            self.trunk.requires_grad_(True)
        out: Tensor = self.head(torch.tanh(self.trunk(x)))
        return out


def test_a_frozen_layer_that_thaws_ends_the_run_before_its_step(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"trunk.weight was frozen when the run was built and is trainable now"):
        trained(job(model=lambda: Thawing(trains=False), eval_data=None), tmp_path, checkpoint_every=1)
    assert sorted(path.name for path in (tmp_path / "checkpoints").glob("step-*"))[-1] == "step-00000002"


def test_a_layer_that_is_frozen_later_may_thaw_and_is_plain_torch_s(tmp_path: Path) -> None:
    made = job(model=lambda: Thawing(trains=True), eval_data=None, order="sequential")
    run = trained(made, tmp_path, train_steps=3)
    torch.manual_seed(0)
    start = trained(made, tmp_path / "start", train_steps=1)
    assert rows(tmp_path)[-1]["step"] == 3
    weights = [r._active_session.setup.model.get_parameter("trunk.weight") for r in (run, start)]
    assert not torch.equal(*weights)


@pytest.mark.parametrize("change", ["frozen", "on_eval"])
def test_what_thaws_elsewhere_is_named_as_well(change: str) -> None:
    model = nn.Sequential(nn.Linear(4, 2).requires_grad_(False), nn.Linear(2, 2))
    contract = LossContract(job=job(), model=model)
    batch = (torch.zeros(1, 4), torch.zeros(1))
    contract.forward(model, batch)
    model[1].requires_grad_(False)
    contract.forward(model, batch)
    model[0].bias.requires_grad_(True)
    with pytest.raises(JobError, match=r"0.bias was frozen"):
        contract.forward(model, batch)


# -- losses that hold something


class Centres(nn.Module):
    def __init__(self, *, trains: bool = True) -> None:
        super().__init__()
        self.centres = nn.Parameter(torch.ones(2, 2), requires_grad=trains)

    def forward(self, output: Tensor, batch: Any) -> Any:
        return (output @ self.centres).sum(), len(output)

    def called(self, output: Tensor, batch: Any) -> Any:
        return self(output, batch)


class Owner:
    """An object that is no module."""

    def __init__(self) -> None:
        self.criterion = Centres()

    def loss(self, output: Tensor, batch: Any) -> Any:
        return self.criterion(output, batch)

    __call__ = loss


def closed_over() -> Callable[..., Any]:
    criterion, table = Centres(), {"inner": [Centres()]}
    return lambda output, batch: criterion(output, batch) + table["inner"][0](output, batch)


def with_keyword(output: Tensor, batch: Any, criterion: Any = None) -> Any:
    return criterion(output, batch)


HELD: dict[str, tuple[Callable[..., Any], list[str]]] = {
    "module": (Centres(), ["loss.centres"]),
    "closure": (closed_over(), ["criterion.centres", "table.inner.[0].centres"]),
    "bound method of a module": (Centres().called, ["self.centres"]),
    "bound method": (Owner().loss, ["self.criterion.centres"]),
    "callable object": (Owner(), ["criterion.centres"]),
    "partial": (partial(with_keyword, criterion=Centres()), ["criterion.centres"]),
    "a parameter": (partial(with_keyword, criterion=nn.Parameter(torch.ones(1))), ["criterion"]),
    "nothing": (lambda output, batch: (F.mse_loss(output, batch[1]), 1), []),
}


@pytest.mark.parametrize("name", HELD)
def test_parameters_of_the_loss_are_found_and_named(name: str) -> None:
    loss, names = HELD[name]
    assert list(find_parameters(loss)) == names
    notes = loss_notes(loss, model=nn.Linear(4, 2), world=World(device=torch.device("cpu")))
    assert len(notes) == bool(names) and all(each in notes[0] for each in names)


def test_what_is_meant_to_be_fixed_or_is_the_model_s_is_no_note() -> None:
    alone = World(device=torch.device("cpu"))
    frozen = Centres(trains=False)
    assert loss_notes(frozen, model=nn.Linear(4, 2), world=alone) == []
    shared = Centres()
    assert loss_notes(lambda output, batch: shared(output, batch), model=shared, world=alone) == []


def test_a_loss_that_ranks_have_drawn_apart_is_refused() -> None:
    with pytest.raises(JobError, match=r"loss= contains loss.centres, whose values differ between ranks"):
        loss_notes(Centres(), model=nn.Linear(4, 2), world=Ranks({"loss.centres": 1}))


def test_given_to_the_optimizer_they_are_refused_with_the_way_out(tmp_path: Path) -> None:
    criterion = Centres()
    made = job(
        loss=criterion, optimizer=lambda named: torch.optim.SGD([*(p for _, p in named), criterion.centres], lr=0.1)
    )
    with pytest.raises(JobError, match="put the loss's module into model="):
        trained(made, tmp_path)


# -- counts, sums, empty terms


@pytest.mark.parametrize("count", [-1, math.nan, math.inf, torch.tensor(-4.0), np.float32(-1.0), "many", None])
def test_a_count_that_is_none_is_named_where_it_is_returned(count: Any) -> None:
    contract = LossContract(job=job(loss=lambda o, b: (o.sum(), count)), model=nn.Linear(4, 2))
    with pytest.raises(JobError, match="count of loss term 'loss'"):
        contract.terms(torch.ones(2, 2), (torch.ones(2, 4), torch.ones(2)), num_samples=2)


@pytest.mark.parametrize("count", [np.int64(3), np.float32(3.0), torch.tensor([3]), True, 3])
def test_a_count_of_any_type_is_a_number(count: Any) -> None:
    contract = LossContract(job=job(loss=lambda o, b: (o.sum(), count)), model=nn.Linear(4, 2))
    terms = contract.terms(torch.ones(2, 2), (torch.ones(2, 4), torch.ones(2)), num_samples=2)
    assert float(terms["loss"][1]) == float(count)


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (lambda o, b: 3.0, "loss= returned a float"),
        (lambda o, b: (torch.tensor(1j), 1), "is complex"),
        (lambda o, b: (np.float32(1.0), 1), "expected a scalar tensor"),
        (nn.CrossEntropyLoss(), "takes \\(output, target\\)"),
    ],
)
def test_a_loss_that_gives_something_else_is_told_so(loss: Any, words: str) -> None:
    contract = LossContract(job=job(loss=loss), model=nn.Linear(4, 2))
    with pytest.raises(JobError, match=words):
        contract.terms(torch.ones(2, 2), (torch.ones(2, 4), torch.ones(2)), num_samples=2)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 2), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.trunk(x))
        return self.a(h), self.b(h)


def counted(batch: Any) -> dict[str, Any]:
    return {"a": len(batch[1]), "b": (batch[2] != -100).sum()}


def rare(**more: Any) -> pl.Job:
    generator = torch.Generator().manual_seed(0)
    x, a = torch.randn(24, 4, generator=generator), torch.randint(0, 2, (24,), generator=generator)
    b = a.clone()
    b[8:16] = -100
    data = torch.utils.data.TensorDataset(x, a, b)

    def loss(output: Any, batch: Any) -> Any:
        counts = counted(batch)
        sums = [F.cross_entropy(output[n], batch[n + 1], reduction="sum") for n in range(2)]
        return {name: (total, counts[name]) for name, total in zip("ab", sums, strict=True)}

    fields: dict[str, Any] = {"forward": lambda model, batch: model(batch[0]), "loss": loss, "count": counted}
    return job(model=Two, train_data=data, eval_data=None, order="sequential", **{**fields, **more})


def by_hand(made: pl.Job, run: pl.Run, *, steps: int) -> dict[str, Tensor]:
    """The loop of plain torch, with a term that has no target left out."""
    model = run._active_session.setup.model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        x, a, b = made.train_data[8 * step : 8 * step + 8]
        optimizer.zero_grad()
        outputs = model(x)
        loss = F.cross_entropy(outputs[0], a, reduction="sum") / 8
        num = int((b != -100).sum())
        loss = loss + F.cross_entropy(outputs[1], b, reduction="sum") / max(num, 1)
        loss.backward()
        optimizer.step()
    return {name: tensor.detach().clone() for name, tensor in model.named_parameters()}


def test_a_term_without_targets_gives_nothing_where_the_job_says_so(tmp_path: Path) -> None:
    with pytest.raises(PacelineError, match="the count of b is 0 over the whole global batch") as refused:
        trained(rare(), tmp_path / "stop", train_steps=3)
    assert "--train.on_empty zero" in str(refused.value)

    run = trained(rare(settings={"train.on_empty": "zero"}), tmp_path / "zero", train_steps=3, log_every=1)
    weights = {name: tensor.detach().clone() for name, tensor in run._active_session.setup.model.named_parameters()}
    fresh = pl.Run(rare(settings={"train.on_empty": "zero", "train.steps": 3}), ranks=1, run_dir=tmp_path / "fresh")
    session = fresh.open()
    expected = by_hand(rare(), fresh, steps=3)
    session.close()
    fresh._restore_process_state()
    assert all(torch.allclose(weights[name], expected[name], rtol=0, atol=1e-7) for name in expected)  # other kernels
    second = [row for row in rows(tmp_path / "zero") if row["step"] == 2][-1]
    assert second["loss"] == second["loss/a"] and second["loss/b"] == 0.0


def test_the_only_term_without_targets_gives_a_step_of_nothing(tmp_path: Path) -> None:
    def loss(output: Any, batch: Any) -> Any:
        return F.cross_entropy(output[1], batch[2], reduction="sum"), (batch[2] != -100).sum()

    made = rare(loss=loss, count=None, settings={"train.on_empty": "zero"})
    run = trained(made, tmp_path, train_steps=3, log_every=1)
    assert [row["loss"] > 0 for row in rows(tmp_path) if "loss" in row] == [True, False, True]
    assert all(bool(p.isfinite().all()) for p in run._active_session.setup.model.parameters())


# -- optimizer state of every shape


class Odd(torch.optim.Optimizer):
    """State under keys that are no parameters, in lists, dicts, under numbers, and of every type of number."""

    def __init__(self, params: Any, *, keys: tuple[str, ...]) -> None:
        super().__init__(params, {"lr": 0.1, "scale": np.float32(0.5)})
        self.keys = keys

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if "counter" in self.keys:
            self.state["all"] = {"step": self.state.get("all", {"step": 0})["step"] + 1}
        if "table" in self.keys:
            self.state[("table", 3)] = {"sum": self.state.get(("table", 3), {"sum": torch.zeros(2)})["sum"] + 1}
        if "address" in self.keys:
            self.state[self.param_groups[0]["params"][0].data_ptr()] = {"step": 1}  # type: ignore[index]
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            if "matrices" in self.keys:
                state.setdefault("GG", [torch.eye(80), torch.zeros(3)])[0].mul_(0.9).add_(p.grad.sum(), alpha=0.1)
                state["moments"] = {
                    "first": state.get("moments", {"first": torch.zeros_like(p)})["first"] * 0.9 + p.grad
                }
                state[0] = state.get(0, torch.zeros_like(p)) + p.grad
                state["a/b"] = state.get("a/b", torch.zeros(())) + 1
                state["z"] = state.get("z", 1j) * np.float64(2.0)
                p.add_(state["moments"]["first"], alpha=-0.01).add_(state["GG"][0].mean(), alpha=0.1).add_(
                    state[0], alpha=-0.01
                )
            p.add_(p.grad, alpha=-0.1 / float(self.state["all"]["step"] if "counter" in self.keys else 1))


@pytest.mark.parametrize("keys", [("counter",), ("matrices",), ("counter", "table", "matrices")])
def test_optimizer_state_of_every_shape_outlives_a_resume(tmp_path: Path, keys: tuple[str, ...]) -> None:
    made = job(optimizer=lambda named: Odd([p for _, p in named], keys=keys), eval_data=None)
    digests = []
    for name, stops in (("whole", [4]), ("cut", [2, 4])):
        for steps in stops:
            run = trained(made, tmp_path / name, train_steps=steps)
        digests.append(json.loads((tmp_path / name / "weights.json").read_text())["digest"])
    assert digests[0] == digests[1]
    state = run.optimizers[0].state
    if "table" in keys:
        assert state[("table", 3)]["sum"].tolist() == [4.0, 4.0]  # type: ignore[index]
    if "matrices" in keys:
        first = state[run.optimizers[0].param_groups[0]["params"][0]]
        assert 0 in first and first["a/b"] == 4 and first["z"] == 16j


def test_state_by_an_address_is_refused_after_the_first_step(tmp_path: Path) -> None:
    made = job(optimizer=lambda named: Odd([p for _, p in named], keys=("address",)), eval_data=None)
    with pytest.raises(CheckpointError, match="the state of Odd has a key that can't be saved"):
        trained(made, tmp_path)
    assert not list((tmp_path / "checkpoints").glob("step-*"))


# -- attributes that training moves


class Moving(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.still, self.cache = nn.Linear(4, 2), 1.0, None
        self.temperature, self.phase, self.table, self.recent = 5.0, "warm", np.zeros(2), deque(maxlen=3)

    def forward(self, x: Tensor) -> Tensor:
        self.cache = 1 if self.cache is None else self.cache
        if self.training:
            self.temperature *= 0.9
            self.phase += "!"
            self.table[0] += 1
            self.recent.append(len(x))
            self.layer.seen = getattr(self.layer, "seen", 0) + 1
        out: Tensor = self.layer(x) / self.temperature
        return out


def test_attributes_that_training_moves_are_named_once(tmp_path: Path) -> None:
    centre = nn.Module()
    centre.register_buffer("mean", torch.zeros(1))

    def loss(output: Tensor, batch: Any) -> Any:
        centre.mean += 1
        return F.cross_entropy(output, batch[1], reduction="sum"), len(output)

    trained(job(model=Moving, loss=loss), tmp_path, train_steps=4, checkpoint_every=2)
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    told = [event["text"] for event in events if "checkpoints do not contain" in event.get("text", "")]
    expected = (
        "Moving.temperature, Moving.phase, Moving.table, Moving.recent, layer.seen, centre.mean, and a resumed run"
    )
    assert len(told) == 1 and told[0].startswith(f"checkpoints do not contain {expected}"), told


def test_the_zoo_s_models_keep_nothing(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.GELU())
    unsaved = UntrackedStateWarning([], model=model)
    model(torch.zeros(2, 4))
    unsaved.start_tracking()
    model(torch.zeros(2, 4))
    assert unsaved.warning_text() == ""


# -- steps that are left out, and scales that all ranks share


def test_schedules_go_on_in_a_step_that_is_left_out(tmp_path: Path) -> None:
    x, y = torch.randn(24, 4), torch.zeros(24, dtype=torch.long)
    x[8] = math.nan
    made = job(
        train_data=torch.utils.data.TensorDataset(x, y), eval_data=None, order="sequential", model=lambda: nn.Linear(4, 2),
        lr_schedule=lambda o: torch.optim.lr_scheduler.StepLR(o, 1, 0.5), settings={"train.on_nonfinite": "skip"},
    )  # fmt: skip
    trained(made, tmp_path, train_steps=3, log_every=1)
    found = {row["step"]: row["lr"] for row in rows(tmp_path) if "lr" in row}
    assert found[1] == 0.1 and found[3] == 0.1 * 0.5**2


@pytest.mark.parametrize("is_cut", [True, False])
def test_where_ranks_hold_parts_an_overflow_of_one_is_everybody_s(is_cut: bool) -> None:
    weight = torch.ones(2, 2)
    part = ShardSpec.from_ranges((4, 2), dim=0, ranges=[(0, 2)]) if is_cut else ShardSpec.full((2, 2))
    held = LocalTensor(name="weight", shard_spec=part, dtype=weight.dtype, get_tensor=lambda: weight)
    scaler = make_scaler(
        ShardedTensors(world=World(device=torch.device("cpu")), tensors=[held]), Overflowing(), init_scale=8.0
    )
    parameter = nn.Parameter(weight)
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler.scale(parameter.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert bool((parameter == 1.0).all()) is is_cut  # the other rank's rows were infinite: no rank takes the step
    assert scaler.get_scale() == (4.0 if is_cut else 8.0)


class Overflowing(World):
    """Another rank has found an infinity."""

    def __init__(self) -> None:
        super().__init__(device=torch.device("cpu"))

    def all_reduce(self, tensor: Tensor, *, op: Any = "sum") -> Tensor:
        assert op == "max"
        return tensor.fill_(1.0)


@pytest.mark.parametrize("step", [5, 2])
def test_the_weights_of_earlier_updates_stand_under_their_own_number(step: int) -> None:
    model = nn.Linear(2, 1, bias=False)
    stash = PipeDreamStep.__new__(PipeDreamStep)
    stash._version_rule, stash._stage = VersionRule(stages=3, rule=Rule.NEWEST), 0
    stash.versions = WeightVersions(model, named_parameters=trainable_parameters(model), is_direct=False)
    kept = {ago: {"weight": torch.full((1, 2), float(step - ago))} for ago in (1, 2)}
    with torch.no_grad():
        model.weight.fill_(float(step))
    stash.resume(step, ends=[-2, -1, 0], older_weights=kept)
    for number in (step, step - 1, step - 2):
        weights = stash.versions.get(number)
        assert weights is not None and weights["weight"].tolist() == [[float(number)] * 2]
    assert stash.versions.available_version(0) == step - 2
    held = LocalTensor(
        name="weight", shard_spec=ShardSpec.full((1, 2)), dtype=torch.float32, get_tensor=lambda: model.weight.detach()
    )
    weights_of_all = ShardedTensors(world=World(device=torch.device("cpu")), tensors=[held])
    (saved,) = StashedWeightsState(step=stash, weights=weights_of_all, rank=0).extend({}, {}, {})[0].values()
    found = {one.name: torch.frombuffer(bytearray(one.data), dtype=torch.float32).tolist() for one in saved}
    assert found == {f"{ago}/weight": [float(step - ago)] * 2 for ago in (1, 2)}


# -- known at the start


def test_a_schedule_that_is_shorter_than_the_run_is_refused_before_a_step(tmp_path: Path) -> None:
    made = job(lr_schedule=lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=5))
    with pytest.raises(JobError, match="OneCycleLR, which ends before the run does") as refused:
        trained(made, tmp_path, train_steps=6)
    assert "it has 5 steps, but the run has 6" in str(refused.value) and not rows_of(tmp_path)
    trained(made, tmp_path / "fits", train_steps=5)


def rows_of(folder: Path) -> list[Any]:
    return rows(folder) if (folder / "metrics.jsonl").exists() else []


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"global_batch_size": 25}, "larger than the data, 24 samples an epoch"),
        ({"optimizer": lambda named: torch.optim.SGD(named, lr=math.nan)}, "with lr=nan in group 0"),
        ({"optimizer": lambda named: torch.optim.SGD(named, lr=torch.tensor(math.inf))}, "with lr=inf in group 0"),
        ({"lr_schedule": lambda o: torch.optim.lr_scheduler.StepLR(OTHER, 3)}, "its StepLR controls another one"),
        ({"lr_schedule": lambda o: 3}, "expected a schedule with step"),
        ({"model": lambda: nn.DataParallel(nn.Linear(4, 2))}, "model= returned a DataParallel"),
        ({"model": lambda: nn.parallel.DistributedDataParallel(nn.Linear(4, 2))}, "model= failed: .*process group"),
        ({"forward": lambda model, batch: None}, "forward= returned None"),
    ],
)
def test_what_is_wrong_from_the_start_is_said_at_the_start(tmp_path: Path, fields: dict[str, Any], words: str) -> None:
    with pytest.raises((JobError, UsageError), match=words):
        trained(job(**{"eval_data": None, **fields}), tmp_path)
    assert not rows_of(tmp_path)


OTHER = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)


@pytest.mark.parametrize(("samples", "is_told"), [(25, True), (24, False), (26, False)])
def test_a_last_batch_of_one_sample_is_told_before_a_batch_norm_meets_it(
    tmp_path: Path, samples: int, is_told: bool
) -> None:
    data = torch.utils.data.TensorDataset(torch.randn(samples, 4), torch.zeros(samples, dtype=torch.long))
    trained(job(train_data=data, eval_data=None), tmp_path, train_steps=3)
    trained(job(train_data=data, eval_data=None, settings={"data.drop_last": True}), tmp_path / "drop", train_steps=6)
    assert "has a microbatch of one" not in (tmp_path / "events.jsonl").read_text()
    if is_told:
        with pytest.raises(ValueError, match="more than 1 value"):
            trained(job(train_data=data, eval_data=None), tmp_path / "more", train_steps=6)
    else:
        trained(job(train_data=data, eval_data=None), tmp_path / "more", train_steps=6)
    assert ("has a microbatch of one" in (tmp_path / "more" / "events.jsonl").read_text()) is is_told


def test_options_of_other_kinds_are_recorded() -> None:
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([{"params": [parameter], "kind": torch.float16, "made": object()}], lr=0.1)
    (found,) = factory_options([optimizer])[0]
    assert found["kind"]["is"] == "torch.float16" and found["lr"] == 0.1


@pytest.mark.parametrize(
    "last, says",
    [
        ((), "2.bias is float32[2] in the checkpoint and absent in the model"),
        ((nn.Linear(6, 2), nn.Linear(2, 2)), "3.bias is absent in the checkpoint and float32[2] in the model"),
        ((nn.Linear(6, 3),), "2.bias is float32[2] in the checkpoint and float32[3] in the model"),
        ((nn.Linear(6, 2).double(),), "2.bias is float32[2] in the checkpoint and float64[2] in the model"),
    ],
)
def test_a_checkpoint_of_another_model_says_what_is_there_and_here(
    tmp_path: Path, last: tuple[nn.Module, ...], says: str
) -> None:
    trained(job(eval_data=None), tmp_path, train_steps=2)
    other = job(eval_data=None, model=lambda: nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), *last))
    with pytest.raises(PacelineError, match=re.escape(says)):
        trained(other, tmp_path, train_steps=4)
