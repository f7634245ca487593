"""Changes of a job to its own weights after each update, such as a momentum teacher, happen once on every rank."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.comm.process_group import World
from paceline.config.layout import parse_layout
from paceline.config.settings import Settings
from paceline.config.update_rule import UpdateRule, parse_update
from paceline.data.loader import make_loader
from paceline.data.order.cursor import Cursor
from paceline.data.types import BatchPartition
from paceline.errors import JobError, LayoutError
from paceline.job import Job
from paceline.planner.layout.execution_plan import JobFacts, Resources, make_execution_plan
from paceline.trainer.checks.option_compatibility import check_compatibility
from paceline.trainer.setup.build_training_setup import TrainingSetup, build_training_setup
from paceline.verification.reference.reference import Reference, ReferenceConfig, RunPosition

BATCH, MICRO, STEPS = 24, 4, 4


class Byol(nn.Module):
    """Student, predictor and a teacher; `moves` is the mistake of moving it in the forward."""

    def __init__(self, *, moves: bool = False) -> None:
        super().__init__()
        self.student = nn.Linear(6, 8, dtype=torch.float64)
        self.predict, self.moves = nn.Linear(8, 8, dtype=torch.float64), moves
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            if self.moves and self.training:
                move(self, 0)
            target = F.normalize(self.teacher(x + 0.1))
        return F.normalize(self.predict(self.student(x))), target


def move(model: nn.Module, step: int) -> None:
    assert isinstance(model, Byol)
    decay = 0.9 - 0.1 * step
    for teacher, student in zip(model.teacher.parameters(), model.student.parameters(), strict=True):
        teacher.mul_(decay).add_(student, alpha=1 - decay)


def job_of(**changes: Any) -> Job:
    x = torch.randn(96, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    given: dict[str, Any] = {
        "model": Byol,
        "loss": lambda output, batch: ((output[0] - output[1]).square().sum(), len(batch[0])),
        "train_data": torch.utils.data.TensorDataset(x, x),
        "forward": lambda model, batch: model(batch[0]),
        "optimizer": lambda named: torch.optim.SGD(named, lr=0.5),
        "global_batch_size": BATCH,
        "on_update": move,
        **changes,
    }
    return Job(**given)


def built(job: Job, replicas: int) -> TrainingSetup:
    plan = make_execution_plan(
        layout=parse_layout("threads" if replicas > 1 else "single"),
        update=UpdateRule(),
        resources=Resources(ranks=replicas, cores=1),
        facts=JobFacts(global_batch_size=BATCH, micro_batch_size=MICRO),
    )
    return build_training_setup(job=job, settings=Settings(), plan=plan, world=World.alone())


def trained(made: TrainingSetup) -> dict[str, Tensor]:
    cut = BatchPartition(global_batch_size=BATCH, micro_batch_size=MICRO)
    feed = iter(make_loader(data=made.job.train_data, collate=None, order=None, seed=0, partition=cut, cursor=Cursor()))
    try:
        for _ in range(STEPS):
            made.step.run(next(feed))
    finally:
        made.close()
    return dict(made.model.state_dict())


def plain(job: Job) -> dict[str, Tensor]:
    """In plain PyTorch; of the reference only the start and the order of samples."""
    spec = ReferenceConfig(seed=0, global_batch_size=BATCH, micro_batch_size=MICRO)
    source = Reference(job=job, config=spec, cast=lambda x: x)
    model, optimizer = source.model.train(), job.optimizer([(n, p) for n, p in source.model.named_parameters()])
    assert isinstance(optimizer, torch.optim.Optimizer)
    for step in range(STEPS):
        samples = source.reader.batch(epoch=0, position=step * BATCH, size=BATCH)
        optimizer.zero_grad()
        for start in range(0, BATCH, MICRO):
            x = source.reader.read(epoch=0, indices=samples[start : start + MICRO])[0]
            (F.mse_loss(*model(x), reduction="sum") / BATCH).backward()
        optimizer.step()
        with torch.no_grad():
            move(model, step + 1)
    return dict(model.state_dict())


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_a_teacher_is_moved_once_after_each_update(replicas: int) -> None:
    found, right = trained(built(job_of(), replicas)), plain(job_of())
    for name, value in right.items():  # sums of a few float64 in another order, over a few steps
        torch.testing.assert_close(found[name], value, rtol=2.0**-44, atol=2.0**-44)
    assert not torch.equal(right["teacher.weight"], right["student.weight"])


def test_the_average_of_the_weights_is_taken_after_they_were_moved() -> None:
    """A job that resets or clamps weights after an update would otherwise save an average of what it never used."""
    made = built(job_of(ema=0.75, on_update=lambda model, step: model.predict.weight.fill_(float(step))), 1)
    averages = dict(zip(made.update.ema.names, made.update.ema.averages, strict=True))  # type: ignore[union-attr]
    right = averages["predict.weight"].clone()
    trained(made)
    for step in range(1, STEPS + 1):
        right = 0.75 * right + 0.25 * step
    torch.testing.assert_close(averages["predict.weight"], right, rtol=2.0**-44, atol=2.0**-44)


def test_the_reference_moves_it_too() -> None:
    job, at = job_of(), RunPosition(steps_done=0, epoch=0, batch_start=0)
    reference = Reference(
        job=job, config=ReferenceConfig(seed=0, global_batch_size=BATCH, micro_batch_size=MICRO), cast=lambda x: x
    )
    for step in range(STEPS):
        gradient = reference.compute_gradient(at)
        reference.update(gradient.total)
        at = RunPosition(steps_done=step + 1, epoch=0, batch_start=(step + 1) * BATCH)
    for name, value in plain(job).items():
        torch.testing.assert_close(reference.model.state_dict()[name], value, rtol=2.0**-44, atol=2.0**-44)


def test_one_that_moves_in_the_forward_is_refused_with_the_way_out() -> None:
    with pytest.raises(JobError, match=r"teacher.weight, which is not trained(.|\n)*teacher(.|\n)*on_update="):
        trained(built(job_of(model=lambda: Byol(moves=True), on_update=None), 2))


@pytest.mark.parametrize(
    ("layout", "update", "said"),
    [
        ("fsdp", "sync", "needs whole weights"),
        ("pp", "sync", "needs whole weights"),
        ("tp", "sync", "needs whole weights"),
        ("ddp", "diloco,every=2", "makes its own updates"),
        ("ddp", "hogwild", "makes its own updates"),
    ],
)
def test_it_is_refused_where_no_rank_has_whole_weights(layout: str, update: str, said: str) -> None:
    plan = make_execution_plan(
        layout=parse_layout(layout),
        update=parse_update(update),
        resources=Resources(ranks=2, cores=1),
        facts=JobFacts(global_batch_size=BATCH, micro_batch_size=MICRO),
    )
    with pytest.raises((JobError, LayoutError), match=said):
        check_compatibility(job_of(), Settings(), plan)


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_a_layer_that_the_job_freezes_stays_as_it_is(replicas: int) -> None:
    frozen: list[Tensor] = []

    def freeze(model: nn.Module, step: int) -> None:
        move(model, step)
        if step == 2:
            assert isinstance(model, Byol)
            model.predict.requires_grad_(False)
            frozen.append(model.predict.weight.detach().clone())

    found = trained(built(job_of(on_update=freeze), replicas))
    assert torch.equal(found["predict.weight"], frozen[0])
    assert not torch.equal(found["student.weight"], Byol().student.weight)
