"""Tensors that no layout supports are refused by name before placement; ranks start bit for bit alike."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import paceline as pl
from paceline.comm.process_group import World
from paceline.comm.rank_threads import thread_worlds
from paceline.config.settings import Settings
from paceline.errors import JobError
from paceline.parallel.initialization.unsupported_tensors import refuse_tensors
from paceline.parallel.module_access.broadcast_initial import broadcast_initial_tensors
from paceline.trainer.setup.build_training_setup import full_model_builder


class Pair(nn.Module):
    def __init__(self, change: Callable[["Pair"], Any]) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 6), nn.Linear(4, 6)
        change(self)


def data(name: str, make: Callable[[Pair], Tensor]) -> Callable[[Pair], Any]:
    return lambda model: setattr(model.get_parameter(name), "data", make(model))


def buffer(make: Callable[[Pair], Tensor]) -> Callable[[Pair], Any]:
    return lambda model: model.register_buffer("q", make(model))


def parameter(make: Callable[[Pair], Tensor]) -> Callable[[Pair], Any]:
    return lambda model: model.register_parameter("q", nn.Parameter(make(model)))


def laid(first: slice, second: slice) -> Callable[[Pair], Any]:
    """Both weights in one memory, in some of its columns."""

    def change(model: Pair) -> None:
        memory = torch.zeros(6, 8)
        model.a.weight.data, model.b.weight.data = memory[:, first], memory[:, second]

    return change


REFUSED: dict[str, tuple[Callable[[Pair], Any], str]] = {
    "tie by storage": (data("b.weight", lambda m: m.a.weight.data), "a.weight and b.weight share memory"),
    "view": (data("b.weight", lambda m: m.a.weight.data.view(4, 6).t()), "a.weight and b.weight share memory"),
    "slice": (parameter(lambda m: m.a.weight.data[2:3]), "q and a.weight share memory"),
    "columns in common": (laid(slice(0, 8, 2), slice(2, 6)), "a.weight and b.weight share memory"),
    "buffer of a weight": (buffer(lambda m: m.a.weight.data[0]), "the buffer q shares the memory of .* a.weight"),
    "coo": (buffer(lambda _: torch.eye(3).to_sparse()), "the buffer q is sparse .sparse_coo."),
    "csr": (buffer(lambda _: torch.eye(3).to_sparse_csr()), "the buffer q is sparse .sparse_csr."),
    "sparse weight": (parameter(lambda _: torch.eye(3).to_sparse()), "the parameter q is sparse"),
    "nested": (
        buffer(lambda _: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged)),
        "the buffer q is a nested tensor",
    ),
    "nan": (lambda m: m.a.weight.data[1, 2].fill_(float("nan")), "the initial weights of a.weight contain NaN"),
}
SOUND: dict[str, Callable[[Pair], Any]] = {
    "plain": lambda _: None,
    "tied by name": lambda m: setattr(m.b, "weight", m.a.weight),
    "apart in one memory": laid(slice(0, 4), slice(4, 8)),
    "columns in turn": laid(slice(0, 8, 2), slice(1, 8, 2)),
    "infinite": lambda m: m.a.weight.data[1, :2].copy_(torch.tensor([float("inf"), -float("inf")])),
    "nan in a buffer": buffer(lambda _: torch.full((2,), float("nan"))),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("case", REFUSED)
def test_such_a_tensor_is_refused_by_name_by_every_way_to_build(case: str) -> None:
    change, said = REFUSED[case]
    job = pl.Job(
        model=lambda: Pair(change),
        loss=lambda output, batch: (output.sum(), 1),
        train_data=[torch.zeros(4)] * 4,  # type: ignore[arg-type]
        optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.1),
        global_batch_size=2,
    )
    with pytest.raises(JobError, match=said):
        full_model_builder(job, Settings())()
    with pytest.raises(JobError, match=said):
        pl.place(lambda: Pair(change))


@pytest.mark.parametrize("case", SOUND)
def test_what_only_looks_like_it_is_taken(case: str) -> None:
    refuse_tensors(Pair(SOUND[case]))


def started(models: list[nn.Module]) -> list[list[str]]:
    worlds = thread_worlds(replicas=len(models), world=World.alone(), timeout_seconds=30)
    found: list[list[str]] = [[] for _ in models]

    def run(rank: int) -> None:
        found[rank] = broadcast_initial_tensors(models[rank], world=worlds[rank])

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(models))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_every_rank_begins_with_rank_0s_buffers_and_weights() -> None:
    def model(rank: int) -> nn.Module:
        made = nn.Linear(2, 1, bias=False)
        made.weight.data.fill_(1.5)
        made.register_buffer("noise", torch.full((3,), float(rank)))
        made.register_buffer("hole", torch.full((2,), float("nan")))
        made.register_buffer("sign", torch.tensor(0.0 if rank == 0 else -0.0))
        made.register_buffer("table", torch.polar(torch.ones(2), torch.full((2,), float(rank))))
        made.register_buffer("wide", torch.full((1,), float(rank)).expand(4))
        return made

    models = [model(rank) for rank in range(3)]
    assert started(models) == [[], *[["noise", "sign", "table", "wide"]] * 2]
    for other in models[1:]:
        for name, value in models[0].named_buffers():
            torch.testing.assert_close(other.get_buffer(name), value, rtol=0, atol=0, equal_nan=True)
        assert not torch.signbit(other.get_buffer("sign"))
