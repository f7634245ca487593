"""BatchNorm in every situation of a forward equals ten lines of plain PyTorch, on one rank and on several."""

import copy
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from paceline.comm.process_group import World
from paceline.comm.rank_threads import thread_worlds
from paceline.config.layout import parse_layout
from paceline.config.settings import Settings, Train
from paceline.config.update_rule import UpdateRule
from paceline.data.loader import make_loader
from paceline.data.order.cursor import Cursor
from paceline.data.types import BatchPartition
from paceline.errors import JobError
from paceline.job import Job
from paceline.parallel.batchnorm.running_statistics import StatisticsRecorder
from paceline.parallel.batchnorm.sync_batchnorm import synchronize_batchnorms
from paceline.planner.layout.execution_plan import JobFacts, Resources, make_execution_plan
from paceline.trainer.setup.build_training_setup import TrainingSetup, build_training_setup
from paceline.verification.reference.reference import Reference, ReferenceConfig

# A few units in the last place of float64 in each of a handful of additions, on weights that a few steps have moved.
LAST_PLACES = 2.0**-40
STEPS, BATCH, MICRO = 4, 24, 4


class Ghost(nn.BatchNorm1d):
    """Each half of the batch by itself."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([super(Ghost, self).forward(half) for half in x.chunk(2)])


class Direct(nn.BatchNorm1d):
    """The same with torch's function, which counts no batch."""

    def forward(self, x: Tensor) -> Tensor:
        own = self.running_mean, self.running_var, self.weight, self.bias
        if not self.training:
            return F.batch_norm(x, *own, False, 0.0, self.eps)
        return torch.cat([F.batch_norm(half, *own, True, self.momentum or 0.0, self.eps) for half in x.chunk(2)])


class Formula(nn.BatchNorm1d):
    """Statistics by a formula of its own."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                for buffer, now in ((self.running_mean, x.mean(0)), (self.running_var, x.var(0))):
                    assert buffer is not None and self.momentum is not None
                    buffer.mul_(1 - self.momentum).add_(self.momentum * now)
        return F.layer_norm(x, x.shape[1:], self.weight, self.bias)


class Difference(nn.BatchNorm1d):
    """Statistics that move by a difference, whose value goes nowhere else."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            assert self.running_mean is not None and self.running_var is not None and self.momentum is not None
            self.running_mean += self.momentum * (x.mean(0).detach() - self.running_mean)
            self.running_var += self.momentum * (x.var(0).detach() - self.running_var)
        return F.layer_norm(x, x.shape[1:], self.weight, self.bias)


class Renormed(Formula):
    """Batch renormalisation: the output in training is that of the running statistics (arXiv 1702.03275)."""

    def forward(self, x: Tensor) -> Tensor:
        assert self.running_mean is not None and self.running_var is not None
        ratio = (x.var(0).sqrt() / self.running_var.sqrt()).detach().clamp(1 / 3, 3)
        shift = ((x.mean(0) - self.running_mean) / self.running_var.sqrt()).detach().clamp(-5, 5)
        return super().forward(x) * ratio + shift


class Warming(nn.BatchNorm1d):
    """A factor from the norm's own count of batches."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        return out * min(1.0, float(self.num_batches_tracked or 0) / 20) if self.training else out


class Complementary(nn.BatchNorm1d):
    """Statistics by the rule of other libraries, in which momentum is the share that is kept."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                for buffer, now in ((self.running_mean, x.mean(0)), (self.running_var, x.var(0))):
                    assert buffer is not None and self.momentum is not None
                    buffer.mul_(self.momentum).add_((1 - self.momentum) * now)
        return F.layer_norm(x, x.shape[1:], self.weight, self.bias)


class Saving(nn.BatchNorm1d):
    """What it computes from its statistics is for the next call."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        if self.training:
            assert self.running_mean is not None
            out = out + getattr(self, "saved", 0.0)
            self.saved = self.running_mean * 2
        return out


class Hooked(nn.BatchNorm1d):
    """A hook of the user's, which runs before those of the engine."""

    def __init__(self, width: int, **options: Any) -> None:
        super().__init__(width, **options)
        self.register_forward_hook(lambda module, _, out: out + module.running_mean)  # type: ignore[operator]


class Outer(nn.BatchNorm1d):
    """A norm that holds another one and calls it first."""

    def __init__(self, width: int) -> None:
        super().__init__(width, dtype=torch.float64)
        self.inner = nn.BatchNorm1d(width, momentum=0.3, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.inner(x))


class Net(nn.Module):
    """Linear, norm, Linear; `way` is what the forward does with the norm, and its second output is trained on too."""

    def __init__(self, way: str, norm: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(6, 8, dtype=torch.float64), norm(8)
        self.last, self.way = nn.Linear(8, 3, dtype=torch.float64), way
        self.calls = 0
        if way == "frozen":
            self.norm.eval()
        if way == "eval after, counted":
            self.register_buffer("seen", torch.zeros(3, dtype=torch.float64))

    def train(self, mode: bool = True) -> "Net":
        super().train(mode)
        if self.way == "frozen":
            self.norm.eval()
        return self

    def inner(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.norm(self.first(x))))

    def resting(self, x: Tensor) -> Tensor:
        self.norm.eval()
        with torch.no_grad():
            found = self.inner(x + 0.1)
        self.norm.train()
        return found

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        extra = torch.zeros(len(x), 3, dtype=x.dtype)
        if not self.training:
            return self.inner(x), extra
        if self.way == "eval before":
            extra = self.resting(x)
        if self.way == "momentum set":
            self.norm.momentum = 0.25
        if self.way == "momentum decayed":
            self.norm.momentum *= 0.7
        if self.way == "momentum by calls":
            self.calls += 1
            self.norm.momentum = 0.5 / self.calls
        if self.way == "momentum by an attribute made here":
            self.made = getattr(self, "made", 0) + 1
            self.norm.momentum = 0.5 / self.made
        if self.way == "momentum in a tensor":
            self.norm.momentum = torch.as_tensor(self.norm.momentum) * 0.7
        if self.way in LATE:
            self.calls += 1
        if self.way == "frozen late" and self.calls > 14:
            self.norm.eval()
        if self.way == "frozen once" and self.calls == 14:
            self.norm.eval()
        if self.way == "frozen by the norm's count" and int(self.norm.num_batches_tracked) >= 14:
            self.norm.eval()
        if self.way == "eval after, counted":
            self.seen += 1
        if self.way == "put back":
            kept = [buffer.clone() for buffer in self.norm.buffers()]
            extra = self.inner(x * 2).detach()
            for buffer, value in zip(self.norm.buffers(), kept, strict=True):
                buffer.copy_(value)
        if self.way == "checkpointed":
            out = checkpoint(self.inner, x, use_reentrant=False)
        else:
            out = self.inner(x)
        if self.way in ("eval after", "eval after, counted"):
            extra = self.resting(x)
        if self.way == "untracked":
            self.norm.track_running_stats = False
            extra = self.inner(x - 1).detach()
            self.norm.track_running_stats = True
        if self.way == "second momentum":
            kept, self.norm.momentum = self.norm.momentum, 0.01
            extra = self.inner(x * 2).detach()
            self.norm.momentum = kept
        if self.way == "looked at":
            extra = (self.norm.running_mean[:3] + self.norm.running_var.sqrt()[:3]).expand(len(x), 3)
        if self.way == "looked at late" and self.calls > 14:
            extra = (self.norm.running_mean[:3] + self.norm.running_var.sqrt()[:3]).expand(len(x), 3)
        if self.way == "a view" and not hasattr(self, "views"):
            self.views = [self.norm.running_mean[:3]]
        if self.way == "a view":
            extra = self.views[0].expand(len(x), 3)
        if self.way == "read from the state dict, late":
            self.calls += 1
            if self.calls > 14:
                extra = self.state_dict()["norm.running_mean"][:3].expand(len(x), 3)
        if self.way == "used late":
            self.calls += 1
            mean = self.norm.running_mean
            if self.calls > 14:
                extra = mean[:3].expand(len(x), 3)
        if self.way == "read in the backward":
            out.register_hook(lambda gradient: gradient * (1 + self.norm.running_mean.mean()))
        if self.way == "past it" or (self.way == "past it, sometimes" and x[0, 0] > 2):
            extra = F.batch_norm(self.first(x * 2), self.norm.running_mean, self.norm.running_var, training=True)[:, :3]
        if self.way == "copied":
            extra = copy.deepcopy(self.norm)(self.first(x * 2)).detach()[:, :3]
        return out, extra


def norm(width: int, kind: type[nn.BatchNorm1d] = nn.BatchNorm1d, **options: Any) -> nn.Module:
    return kind(width, dtype=torch.float64, **options)


ORDERED = (
    "eval before",
    "eval after",
    "momentum decayed",
    "momentum by calls",
    "looked at",
    "past it",
    "past it, sometimes",
)  # what is known only in one process's order
LATE = ("frozen late", "frozen once", "looked at late")  # in the third of four steps
WAYS: dict[str, Callable[..., nn.Module]] = {
    **dict.fromkeys((*ORDERED, "eval after, counted"), norm),
    **dict.fromkeys(
        ("plain", "untracked", "momentum set", "second momentum", "put back", "copied", "frozen", "checkpointed"), norm
    ),
    "momentum 0": partial(norm, momentum=0.0),
    "momentum None": partial(norm, momentum=None),
    "ghost": partial(norm, kind=Ghost),
    "ghost, counted": partial(norm, kind=Ghost, momentum=None),
    "ghost by function": partial(norm, kind=Direct),
    "by formula": partial(norm, kind=Formula),
    "instance": lambda width: nn.Sequential(
        nn.Unflatten(1, (4, 2)), nn.InstanceNorm1d(4, track_running_stats=True, dtype=torch.float64), nn.Flatten()
    ),
    "nested": Outer,
    **dict.fromkeys(LATE, norm),
    **dict.fromkeys(("momentum by an attribute made here", "momentum in a tensor", "frozen by the norm's count"), norm),
    **dict.fromkeys(("a view", "read from the state dict, late", "used late", "read in the backward"), norm),
    "by another rule": partial(norm, kind=Complementary),
    "by difference": partial(norm, kind=Difference),
    "renormed": partial(norm, kind=Renormed),
    "warming": partial(norm, kind=Warming),
    "hooked": partial(norm, kind=Hooked),
}


def loss(output: tuple[Tensor, Tensor], batch: Any) -> tuple[Tensor, int]:
    return F.cross_entropy(output[0] + output[1], batch[1], reduction="sum"), len(batch[1])


def job_of(way: str) -> Job:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(96, 6, generator=generator, dtype=torch.float64) * 2 + 1
    return Job(
        model=lambda: Net(way, WAYS[way]),
        loss=loss,
        train_data=torch.utils.data.TensorDataset(x, torch.randint(0, 3, (96,), generator=generator)),
        optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
        global_batch_size=BATCH,
    )


def built(job: Job, replicas: int, *, micro: int, buffers: Any = "fold") -> TrainingSetup:
    plan = make_execution_plan(
        layout=parse_layout("threads" if replicas > 1 else "single"),
        update=UpdateRule(),
        resources=Resources(ranks=replicas, cores=1),
        facts=JobFacts(global_batch_size=BATCH, micro_batch_size=micro),
    )
    return build_training_setup(
        job=job, settings=Settings(train=Train(buffers=buffers)), plan=plan, world=World.alone()
    )


def trained(made: TrainingSetup, *, micro: int, steps: int = STEPS) -> dict[str, Tensor]:
    """A few steps of ours."""
    cut = BatchPartition(global_batch_size=BATCH, micro_batch_size=micro)
    feed = iter(make_loader(data=made.job.train_data, collate=None, order=None, seed=0, partition=cut, cursor=Cursor()))
    try:
        for _ in range(steps):
            made.step.run(next(feed))
    finally:
        made.close()
    return {name: tensor.detach().clone() for name, tensor in made.model.state_dict().items()}


def plain(job: Job, *, micro: int, joined: int = 1) -> dict[str, Tensor]:
    """Ten lines of PyTorch; the reference gives the order of samples and the seed of the start alone."""
    source = Reference(
        job=job,
        config=ReferenceConfig(seed=0, global_batch_size=BATCH, micro_batch_size=micro * joined),
        cast=lambda x: x,
    )
    data, model = source.reader, source.model.train()
    optimizer = job.optimizer(list(model.named_parameters()))
    for step in range(STEPS):
        samples = data.batch(epoch=0, position=step * BATCH, size=BATCH)
        optimizer.zero_grad()
        for start in range(0, BATCH, micro * joined):
            batch = data.read(epoch=0, indices=samples[start : start + micro * joined])
            loss(model(batch[0]), batch)[0].backward()
        for parameter in model.parameters():
            parameter.grad = None if parameter.grad is None else parameter.grad / BATCH
        optimizer.step()
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("micro", [BATCH, MICRO])
@pytest.mark.parametrize("way", WAYS)
def test_one_rank_is_plain_pytorch_bit_for_bit(way: str, micro: int) -> None:
    job = job_of(way)
    found, right = trained(built(job, 1, micro=micro), micro=micro), plain(job, micro=micro)
    assert [name for name, value in right.items() if not torch.equal(value, found[name])] == []


@pytest.mark.parametrize("replicas", [2, 3])
@pytest.mark.parametrize("way", [way for way in WAYS if "counted" not in way or way.startswith("ghost")])
def test_several_ranks_are_one_process(way: str, replicas: int) -> None:
    job = job_of(way)
    found, right = trained(built(job, replicas, micro=MICRO), micro=MICRO), plain(job, micro=MICRO)
    for name, value in right.items():
        torch.testing.assert_close(found[name], value, rtol=LAST_PLACES, atol=LAST_PLACES, msg=lambda m: f"{name}: {m}")  # noqa: B023


def test_a_step_that_is_begun_again_gives_back_what_it_wrote_to_other_buffers() -> None:
    """Every rank gets rank 0's value of them, which has three of six microbatches in each step."""
    made = trained(built(job_of("eval after, counted"), 2, micro=MICRO), micro=MICRO)
    assert made["seen"].tolist() == [3 * STEPS] * 3


def test_a_model_that_rests_a_part_of_itself_does_so_from_the_first_step() -> None:
    """As in a loop that begins with `model.train()`: what only `__init__` has put into eval mode is woken, and told."""

    class Resting(Net):
        def train(self, mode: bool = True) -> Net:
            super().train(mode)
            self.norm.eval()
            return self

    def woken() -> nn.Module:
        net = Net("plain", norm)
        net.norm.eval()
        return net

    for model, is_told in ((lambda: Resting("plain", norm), False), (woken, True)):
        job = replace(job_of("plain"), model=model)
        made = built(job, 1, micro=MICRO)
        assert any("returned norm in eval mode" in note for note in made.notes) == is_told
        found, right = trained(made, micro=MICRO), plain(job, micro=MICRO)
        assert [name for name, value in right.items() if not torch.equal(value, found[name])] == []


def test_between_steps_statistics_are_whoever_s_that_sets_them() -> None:
    made = built(job_of("plain"), 2, micro=MICRO)
    made.model.eval()
    for value in (2.0, 3.0):
        right = torch.full((8,), value, dtype=torch.float64)
        made.model.norm.running_mean.copy_(right)  # as a checkpoint does that is loaded
        made.model(torch.ones(4, 6, dtype=torch.float64))
        assert torch.equal(made.model.norm.running_mean, right)
    made.close()


def test_a_step_that_is_begun_again_has_the_momentum_and_the_statistics_of_before() -> None:
    """As exact mode begins one again on a finer grid, with a forward that changes the momentum."""

    class Decaying(nn.BatchNorm1d):
        def forward(self, x: Tensor) -> Tensor:
            self.momentum = 0.5 * (self.momentum or 0.0)
            return super().forward(x)

    layer, x = Decaying(2, momentum=0.4, dtype=torch.float64), torch.tensor([[1.0, 2.0], [3.0, 6.0]]).double()
    tape = StatisticsRecorder(model=layer, world=World.alone(), exact=True)
    for right, momentum in ((0.2, 0.2), (0.2 * 0.9 + 0.1, 0.1)):
        for _ in range(3):
            tape.begin_step()
            tape.set_microbatch(0)
            layer(x)
        tape.fold(num_micro=1)
        assert layer.momentum == pytest.approx(momentum)
        torch.testing.assert_close(layer.running_mean, right * x.mean(0), rtol=0, atol=LAST_PLACES)
    tape.close()


def that_can_not_wait(way: str) -> TrainingSetup:
    """As where forwards meet other ranks."""
    made = built(job_of(way), 2, micro=MICRO)
    for replica in (made.step.replica, *(other.replica for other in made.step._other_steps)):  # type: ignore[attr-defined]
        vars(replica.state_recorders[0])["_can_wait"] = False
    return made


@pytest.mark.parametrize("way", [way for way in ORDERED if way != "looked at"])
def test_forwards_that_can_not_wait_are_refused_by_name(way: str) -> None:
    words = r"norm (runs in eval mode and in training mode|were written by other code)|momentum of norm"
    with pytest.raises(JobError, match=words):
        trained(that_can_not_wait(way), micro=MICRO, steps=1)


def test_forwards_are_watched_in_the_first_step_alone_and_only_where_norms_keep_statistics() -> None:
    for model, is_watched in ((nn.BatchNorm1d(2), True), (nn.LayerNorm(2), False)):
        world = thread_worlds(replicas=2, world=World.alone(), timeout_seconds=30)[0]
        tape = StatisticsRecorder(model=model, world=world, can_wait=True)
        assert isinstance(tape.recording_context(), TorchFunctionMode) == is_watched
        tape._is_checked = True
        assert not isinstance(tape.recording_context(), TorchFunctionMode)
        tape.close()


@pytest.mark.parametrize("way", ["by difference", "ghost, counted", "by formula", "plain"])
def test_a_norm_that_uses_its_own_statistics_alone_waits_for_no_other_rank(way: str) -> None:
    made = built(job_of(way), 2, micro=MICRO)
    trained(made, micro=MICRO, steps=2)
    assert not made.step.replica.state_recorders[0].is_sequential
    assert made.step.replica.state_recorders[0].new_notes() == []


def test_a_value_that_outlives_the_norm_s_call_is_a_read() -> None:
    made = built(replace(job_of("plain"), model=lambda: Net("plain", partial(norm, kind=Saving))), 2, micro=MICRO)
    trained(made, micro=MICRO, steps=1)
    assert made.step.replica.state_recorders[0].is_sequential


def test_a_copied_model_keeps_nothing_of_the_watch() -> None:
    made = built(job_of("plain"), 2, micro=MICRO)
    watched = vars(made.model.norm)["_buffers"]
    assert type(watched) is not dict
    assert all(type(vars(part)["_buffers"]) is dict for part in copy.deepcopy(made.model).modules())
    made.close()
    assert type(vars(made.model.norm)["_buffers"]) is dict


@pytest.mark.parametrize("way", ["looked at", "plain"])
def test_a_look_at_statistics_that_can_not_wait_is_told(way: str) -> None:
    made = that_can_not_wait(way)
    trained(made, micro=MICRO, steps=1)
    looks = "the forward or the loss reads the running statistics of norm: in a step, each rank's"
    notes = made.step.replica.state_recorders[0].new_notes()
    assert len(notes) == (way == "looked at") and all(note.startswith(looks) for note in notes)


def played(
    models: list[nn.Module], parts: list[Tensor], *, calls: Callable[[nn.Module, Tensor], Tensor]
) -> list[Tensor]:
    """Each replica in a thread: forward and backward of its part; returns the gradients of its input."""
    worlds = thread_worlds(replicas=len(models), world=World.alone(), timeout_seconds=30)
    found: list[Any] = [None] * len(models)

    def run(rank: int) -> None:
        synchronize_batchnorms(models[rank], world=worlds[rank])
        x = parts[rank].clone().requires_grad_()
        calls(models[rank], x).square().sum().backward()
        found[rank] = x.grad

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(models))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def with_eval_pass(model: nn.Module, x: Tensor) -> Tensor:
    model.eval()
    resting = model(x).detach()
    return model.train()(x) * resting


def untracked(model: nn.Module, x: Tensor) -> Tensor:
    norm = next(part for part in model.modules() if isinstance(part, nn.BatchNorm1d))
    norm.track_running_stats = False
    first = model(x * 3)
    norm.track_running_stats = True
    return first + model(x)


def decaying(model: nn.Module, x: Tensor) -> Tensor:
    norm = next(part for part in model.modules() if isinstance(part, nn.BatchNorm1d))
    norm.momentum = 0.5 * (norm.momentum or 1.0)
    return model(x) + model(x * 2)


@pytest.mark.parametrize("momentum", [0.1, 0.0, None])
@pytest.mark.parametrize("calls", [lambda model, x: model(x), with_eval_pass, untracked, decaying])
@pytest.mark.parametrize("sizes", [(8, 8), (5, 3, 4)])
def test_norms_that_meet_are_one_norm_of_the_joined_batch(sizes: tuple[int, ...], calls: Any, momentum: Any) -> None:
    whole = torch.randn(sum(sizes), 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64) * 3 + 2
    make = partial(nn.BatchNorm1d, 3, momentum=momentum, dtype=torch.float64)
    models, right, x = [make() for _ in sizes], make(), whole.clone().requires_grad_()
    for _ in range(2):
        grads = played(models, list(whole.split(list(sizes))), calls=calls)
        x.grad = None
        calls(right, x).square().sum().backward()
        assert x.grad is not None
        torch.testing.assert_close(torch.cat(grads), x.grad, rtol=LAST_PLACES, atol=LAST_PLACES)
        for model in models:
            for name, value in right.named_buffers():
                torch.testing.assert_close(model.get_buffer(name), value, rtol=LAST_PLACES, atol=LAST_PLACES)


def test_a_stand_in_microbatch_changes_no_statistics_of_norms_that_meet() -> None:
    """A rank with fewer microbatches than others repeats one, with weight zero."""
    x = torch.randn(2, 6, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64) * 3 + 2
    models, right = [nn.BatchNorm1d(3, dtype=torch.float64) for _ in range(2)], nn.BatchNorm1d(3, dtype=torch.float64)
    worlds = thread_worlds(replicas=2, world=World.alone(), timeout_seconds=30)
    synchronize_batchnorms(models[1], world=worlds[1]).weight = 0.0
    synchronize_batchnorms(models[0], world=worlds[0])
    other = threading.Thread(target=models[1], args=(x[1],))
    other.start()
    found = models[0](x[0])
    other.join()
    torch.testing.assert_close(found, right(x[0]), rtol=LAST_PLACES, atol=LAST_PLACES)
    for name, value in right.named_buffers():
        torch.testing.assert_close(models[1].get_buffer(name), value, rtol=LAST_PLACES, atol=LAST_PLACES)


def test_a_copy_of_a_norm_that_meets_has_statistics_of_its_own() -> None:
    model = nn.BatchNorm1d(3)
    synchronize_batchnorms(model, world=thread_worlds(replicas=2, world=World.alone(), timeout_seconds=5)[0])
    other = copy.deepcopy(model)
    other.eval()(torch.randn(4, 3))
    other.forward._update_statistics(torch.ones(3), torch.ones(3))  # type: ignore[attr-defined]
    assert float(other.running_mean.sum()) > 0 and float(model.running_mean.sum()) == 0  # type: ignore[union-attr]


def test_norms_that_meet_alone_are_torchs_own() -> None:
    model, right = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    synchronize_batchnorms(model, world=World.alone())
    x = torch.randn(7, 3)
    assert torch.equal(model(x), right(x)) and torch.equal(model.running_var, right.running_var)  # type: ignore[arg-type]
