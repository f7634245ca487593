"""A model without a chain, cut along its exported graph, equals the whole: losses, gradients, draws, buffers, names."""

import os
import random
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.errors import JobError, LayoutError, RunError
from paceline.parallel.pipeline.chain.stages import StageOutput
from paceline.parallel.pipeline.free_memory import absent_parameters
from paceline.parallel.pipeline.graph.cut_points import GraphPlan, plan_graph
from paceline.parallel.pipeline.graph.stages import GraphStages
from paceline.schedule import SCHEDULES
from tests.matrix.matrix_page import patterns, stands
from tests.parallel.pipeline.chain_pipeline_ranks import ROOT, run_ranks
from tests.parallel.pipeline.graph_models import CASES, INPUTS, built
from tests.parallel.pipeline.stages_in_one_process import Ranks, alone

MICRO = 4


def whole(name: str, model: nn.Module) -> tuple[list[Tensor], dict[str, Tensor], dict[str, Tensor]]:
    return alone(model, loss=CASES[name].loss, num_micro=MICRO)


def cutout(name: str, model: nn.Module, plan: GraphPlan) -> Ranks:
    staged = lambda each, index: GraphStages(each, split=plan.split, owned_stages=[index], empty_model=plan.empty_model)  # noqa: E731
    return Ranks(model, cut=plan.split, loss=CASES[name].loss, staged=staged)


def planned(name: str, num_stages: int, **how: Any) -> tuple[nn.Module, GraphPlan]:
    model = built(name)
    before = {n: t.clone() for n, t in model.state_dict().items()}
    state = torch.get_rng_state()
    plan = plan_graph(model, num_stages=num_stages, call=lambda: CASES[name].loss(model, 0), **how)
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(before[n], t) for n, t in model.state_dict().items()), "cutting leaves no trace"
    return model, plan


QUICK = (("unet", 2), ("shared", 3))


@pytest.mark.parametrize(
    ("name", "num_stages"),
    [pytest.param(n, s, marks=[] if (n, s) in QUICK else pytest.mark.soak) for n in CASES for s in (2, 3, 4)],
)
def test_stages_along_the_graph_are_the_whole_model(name: str, num_stages: int) -> None:
    model, plan = planned(name, num_stages)
    losses, right, buffers = whole(name, model)
    ranks = cutout(name, model, plan)
    for microbatch, loss in enumerate(losses):
        assert torch.equal(ranks.train(microbatch), loss)
    found = ranks.gradients()
    assert found.keys() == right.keys()
    for n, gradient in right.items():
        if n in plan.split.ties:
            assert (found[n] - gradient).norm() <= 1e-6 * gradient.norm(), n
        else:
            assert torch.equal(found[n], gradient), n
    for part, each in zip(plan.split.stages, ranks.models, strict=True):
        assert each.state_dict().keys() == model.state_dict().keys()
        assert {
            n
            for n, p in each.named_parameters()
            if p in absent_parameters(each, split=plan.split, owned_stages=[part.index])
        } == {n for n, p in each.named_parameters() if p.is_meta}
    for n, buffer in buffers.items():
        stages = [i for i, part in enumerate(plan.split.stages) if any(n.startswith(f"{m}.") for m in part.modules)]
        home = plan.split.stage_of_buffer.get(n, *stages)
        assert torch.equal(dict(ranks.models[home].named_buffers())[n], buffer), n


def test_a_border_is_where_the_fewest_bytes_are_alive() -> None:
    _, plan = planned("named", 2, bounds=[2, 2])
    assert [(border.preceding_call, border.num_graph_steps) for border in plan.split.boundaries] == [("fc2", 0)]
    _, plan = planned("unet", 2, blocks=["one", "two", "middle", "up_two", "up_one"], bounds=[2, 3])
    assert [(border.preceding_call, border.num_graph_steps) for border in plan.split.boundaries] == [("two", 0)]
    _, plan = planned("unet", 2, blocks=["one", "middle"], bounds=[1, 1])
    assert plan.split.boundaries[0].preceding_call == "one"
    assert plan.split.blocks == ("one", "middle")


def test_a_value_that_is_lost_at_a_border_is_another_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    model, plan = planned("unet", 2)
    right, *_ = whole("unet", model)
    ranks = cutout("unet", model, plan)
    plain = GraphStages._unpack_received

    def dropped(*given: Any) -> dict[str, Tensor]:
        values = plain(*given)
        assert len(values) > 1, "a skip crosses too"
        return {**values, next(iter(values)): torch.zeros_like(next(iter(values.values())))}

    monkeypatch.setattr(GraphStages, "_unpack_received", dropped)
    assert not torch.equal(ranks.forward(0)[0][-1], right[0])


def test_every_stage_tells_what_it_has_no_graph_for() -> None:
    model, plan = planned("named", 2)
    ranks = cutout("named", model, plan)
    with pytest.raises(RunError, match="holds the stages \\[0\\] of 2 only"):
        ranks.models[0](INPUTS[0])
    with pytest.raises(JobError, match="without a call of the model"):
        ranks.stages[0].run(0, None, lambda: None)


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 2)
        self.norm, self.keep = nn.BatchNorm1d(8), Keep()


class Keep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        self.last = x * 2
        return self.inner(x)


class Branch(Layers):
    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        if x.sum() > 0:
            x = self.b(x)
        return self.c(x)


class Luck(Layers):
    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        return self.c(self.b(x) if random.random() < 0.5 else x)


class Hidden(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.keep(self.a(x)) + self.keep.last)


class Left(Layers):
    def forward(self, x: Tensor) -> Tensor:
        self.aside = self.a(x)
        return self.c(self.b(self.aside))


class Counts(Layers):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.c(self.b(self.a(x)) if self.calls < 3 else self.a(x))


class Norms(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.norm(self.b(self.norm(self.a(x)))))


class Overwritten(Layers):
    def forward(self, x: Tensor) -> Tensor:
        x = x * 1.0
        part = x[:, :4]
        y = self.b(self.a(x.detach().clone()))
        part.mul_(2.0)
        return self.c(x + y + nn.functional.pad(part, (0, 4)))


class Raw(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return x @ self.a.weight @ self.b.weight


class Locked(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


REFUSED: list[tuple[type[nn.Module], dict[str, Any], str]] = [
    (Branch, {}, r"branches on a tensor's value(.|\n)*test_graph_stages.py:"),
    (Luck, {}, "draws from random or numpy"),
    (Hidden, {"blocks": ["a", "keep", "c"]}, r"keep creates a value \(mul\) that it does not return, but add needs it"),
    (Left, {}, r"between the calls of its modules, the forward stores a tensor on the model \(self.aside\)"),
    (Counts, {}, r"the forward changes self.calls"),
    (
        Norms,
        {"bounds": [2, 3]},
        "buffer norm.(num_batches_tracked|running_mean) is written by the forward and used on several stages",
    ),
    (
        Overwritten,
        {"bounds": [1, 2]},
        r"between a and b: a value \(mul\) and a value \(slice\) share memory that is overwritten",
    ),
    (Raw, {}, r"2 stages, but the forward makes only 0 module calls to divide among them \(none\)"),
    (Locked, {}, "can't be copied"),
]


@pytest.mark.parametrize(("kind", "how", "said"), REFUSED, ids=lambda value: getattr(value, "__name__", ""))
def test_what_has_no_graph_is_refused_by_name(kind: type[nn.Module], how: dict[str, Any], said: str) -> None:
    model = kind()
    with pytest.raises(LayoutError) as found:
        plan_graph(model, num_stages=2, call=lambda: model(torch.ones(3, 8)), **how)
    assert re.search(said, str(found.value)), str(found.value)


class Plain(Layers):
    """What modules leave on themselves, and hooks in dicts, is other stages' and not the model's to return."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[str, Tensor] = {}
        for name in ("a", "c"):
            self.get_submodule(name).register_forward_hook(lambda m, x, y, name=name: self.kept.update({name: y * 2}))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.c(self.keep(self.a(x)))
        return found


BESIDE: dict[str, tuple[Any, str]] = {
    "twice": (lambda m, x: m(x) + m(x * 2), r"calls the model twice(.|\n)*test_graph_stages.py:(.|\n)*torch.cat"),
    "a hook": (lambda m, x: m(x) + m.kept["a"].mean(), r"reads a value \(mul\) made in a, but(.|\n)*graph_stages.py:"),
    "an attribute": (
        lambda m, x: m(x) + m.keep.last.detach().sum(),
        r"reads a value \(mul\) made in keep, but the mod",
    ),
    "a hook of the last stage": (lambda m, x: m(x) + m.kept["c"].mean(), ""),
}


@pytest.mark.parametrize("name", BESIDE)
def test_what_a_loss_takes_of_other_stages_beside_the_output_is_refused(name: str) -> None:
    model, (loss, said) = Plain(), BESIDE[name]
    how: dict[str, Any] = {"blocks": ["a", "keep", "c"], "bounds": [2, 1]}
    if not said:
        plan_graph(model, num_stages=2, call=lambda: loss(model, torch.ones(3, 8)), **how)
        return
    with pytest.raises(LayoutError) as found:
        plan_graph(model, num_stages=2, call=lambda: loss(model, torch.ones(3, 8)), **how)
    assert re.search(said, str(found.value)) and stands(found.value.what, patterns()), str(found.value)


def test_a_second_call_that_was_not_planned_is_refused() -> None:
    model, x = Plain(), torch.ones(3, 8)
    plan = plan_graph(model, num_stages=2, call=lambda: model(x), blocks=["a", "keep", "c"])
    stages = GraphStages(model, split=plan.split, owned_stages=[0, 1], empty_model=plan.empty_model)
    sent = stages.run(0, None, lambda: (model(x), model(2 * x)))
    with pytest.raises(LayoutError, match="the forward calls the model twice"):
        stages.run(1, sent.as_stage_input(), lambda: (model(x), model(2 * x)))


class Shapes(Layers):
    """Another way for another shape: the border is kept, a module of another stage is not to be had."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        return self.c(self.b(x)) if len(x) == 3 else self.b(self.c(x).repeat(1, 4))


def test_a_shape_that_goes_another_way_is_refused() -> None:
    model = Shapes()
    plan = plan_graph(model, num_stages=2, call=lambda: model(torch.ones(3, 8)), bounds=[2, 1])
    stages = GraphStages(model, split=plan.split, owned_stages=[0, 1], empty_model=plan.empty_model)
    assert isinstance(stages.run(0, None, lambda: model(torch.ones(3, 8))), StageOutput)
    with pytest.raises(LayoutError, match="with these inputs stage 0 uses c, which it does not hold"):
        stages.run(0, None, lambda: model(torch.ones(2, 8)))


JOB = """
import torch, torch.nn.functional as F
import paceline as pl
from tests.parallel.pipeline.graph_models import Unet

def loss(output, batch):
    return F.cross_entropy(output["out"].mean((2, 3)), batch[1], reduction="sum"), len(batch[1])

def make_job(lost: bool = False) -> pl.Job:
    if lost:
        from paceline.parallel.pipeline.graph.stages import GraphStages
        plain = GraphStages._unpack_received
        def dropped(*given):
            values = plain(*given)
            return {**values, next(iter(values)): torch.zeros_like(next(iter(values.values())))}
        GraphStages._unpack_received = dropped
    x = torch.randn(17, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    return pl.Job(
        model=Unet,
        loss=loss,
        train_data=torch.utils.data.TensorDataset(x, (x.sum((1, 2, 3)) > 0).long()),
        optimizer=lambda named: torch.optim.AdamW(named, lr=1e-2),
        global_batch_size=8,
        micro_batch_size=2,
    )
"""


def paceline(folder: Path, *words: str) -> tuple[int, str]:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "paceline", *words]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=400)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.soak
def test_the_command_verifies_resumes_and_finds_what_is_lost(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(JOB)
    code, text = paceline(tmp_path, "verify", "job.py", "--layout", "pp", "--ranks", "2", "--steps", "3")
    assert code == 0 and "stages are cut along the exported graph (no chain of blocks)" in text, text
    lost = ("--job.lost", "true")
    code, text = paceline(tmp_path, "verify", "job.py", "--layout", "pp", "--ranks", "2", "--steps", "1", *lost)
    assert code == 4 and "DIFFERENT at step 1" in text, text
    train = ("train", "job.py", "--layout", "pp,schedule=zb_h1", "--ranks", "2", "--run-dir")
    assert paceline(tmp_path, *train, "whole", "--train.steps", "4")[0] == 0
    assert paceline(tmp_path, *train, "halves", "--train.steps", "2")[0] == 0
    assert paceline(tmp_path, *train, "halves", "--train.steps", "4", "--resume")[0] == 0
    pair = [f"{run}/checkpoints/step-00000004" for run in ("whole", "halves")]
    code, text = paceline(tmp_path, "ckpt", "diff", *pair)
    assert code == 0 and "every tensor is the same, bit for bit" in text, text


@pytest.mark.soak
def test_ranks_along_the_graph_are_one_process_under_every_schedule() -> None:
    names = [name for name, row in SCHEDULES.items() if row.virtual == 1 or name in ("zbv", "interleaved")]
    words = [*(f"unet:{n}" for n in names), "named:1f1b", "named:zb_h1", "shared:1f1b", "shared:zb_h1", "around:zbv"]
    found = run_ranks(
        [*words, "unet:1f1b:lost"], ranks=2, module="tests.parallel.pipeline.graph_pipeline_ranks", timeout=600
    )
    assert max(mine.pop("unet:1f1b:lost")["far"] for mine in found) > 1e-3, "what was broken on purpose"
    for rank, mine in enumerate(found):
        for word, answer in mine.items():
            where = f"{word} on rank {rank}: {answer}"
            assert answer["losses"] and answer["looked"], where
            assert set(answer["differs"]) <= set(answer["ties"]) and answer["far"] < 1e-6, where
