"""Settings of `pl.place` take effect: units, stages, blocks, notes, and the limit for building a whole model."""

from typing import Any

import pytest
import torch
from torch import nn

from paceline.comm.mesh_groups import MeshGroups
from paceline.comm.process_group import World
from paceline.config.layout import parse_layout
from paceline.config.merge_settings import merge, read_requested_settings
from paceline.config.settings import PlacementSettings, Settings
from paceline.config.update_rule import parse_update
from paceline.errors import LayoutError
from paceline.parallel import trace_example_forward as runs
from paceline.parallel.initialization.meta_model import tensor_bytes
from paceline.parallel.module_access.blocks import find_blocks
from paceline.parallel.pipeline.pipeline_model import build_pipeline_model
from paceline.parallel.sharding.units import find_units, parse_units
from paceline.parallel.trace_example_forward import make_block_timer
from paceline.planner.layout.execution_plan import JobFacts, Resources, make_execution_plan
from paceline.planner.layout.mesh import resolve_mesh
from paceline.profiling.model_tracing import block_timer as measured
from paceline.trainer.checks.option_compatibility import unused_placement_notes
from paceline.trainer.setup import initial_model as begin
from tests.custom_loop.place_ranks import Net


def settings(*words: str) -> Settings:
    return merge(read_requested_settings(file=None, overrides=words))


def test_settings_are_read_from_words() -> None:
    words = ("--place.units=Block,leave*", "--place.reshard=false", "--place.stages=1,2", "--place.balance=measured")
    how = settings(*words).place
    assert how.units == ("Block", "leave*") and how.reshard is False and how.stages == (1, 2)
    assert how.balance == "measured" and settings().place.reshard is None


@pytest.mark.parametrize(
    ("words", "units"),
    [
        ((), {"blocks.0", "blocks.1"}),
        (("Block",), {"blocks.0", "blocks.1"}),
        (("blocks.*.up", "leave"), {"blocks.0.up", "blocks.1.up", "leave"}),
        (("Block", "enter"), {"blocks.0", "blocks.1", "enter"}),
        (("200",), {"blocks.0", "blocks.1"}),
    ],
)
def test_units_are_classes_patterns_or_a_size(words: tuple[str, ...], units: set[str]) -> None:
    model = Net()
    assert set(find_units(model, choice=parse_units(words, model=model))) == units


def test_units_that_are_not_there_are_refused() -> None:
    for words, said in (
        (("Blok",), "class 'Blok'"),
        (("layers.*",), "name 'layers"),
        (("100", "Block"), "mixes a size"),
    ):
        with pytest.raises(LayoutError, match=said):
            find_units(Net(), choice=parse_units(words, model=Net()))


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Sums:
    """A microbatch of the chain."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __call__(self) -> Any:
        return self.run(self.model)

    def run(self, model: nn.Module) -> Any:
        return {"loss": model(torch.ones(2, 4)).sum()}


def bounds(how: PlacementSettings, weights: list[float] | None = None) -> list[tuple[int, int]]:
    model, asked = Chain(), parse_layout("pp=2")
    world = World(rank=0, world_size=2)
    mesh = resolve_mesh(asked, ranks=2, problems=[])
    seconds = None if weights is None else lambda blocks: weights
    piped = build_pipeline_model(
        model, layout=asked, mesh=mesh, world=world, call=Sums(model), settings=how, time_modules=seconds
    )
    return [tuple(bound) for bound in piped.split.bounds]


def test_stages_are_as_listed_or_as_measured() -> None:
    assert bounds(PlacementSettings()) == [(0, 2), (2, 4)]
    assert bounds(PlacementSettings(stages=(1, 3))) == [(0, 1), (1, 4)]
    assert bounds(PlacementSettings(), weights=[9.0, 1.0, 1.0, 1.0]) == [(0, 1), (1, 4)]
    with pytest.raises(LayoutError):
        bounds(PlacementSettings(stages=(1, 2)))


def test_blocks_are_timed_where_that_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    model, world = Chain(), World.alone()
    assert make_block_timer(model, PlacementSettings(), world, Sums(model)) is None
    assert make_block_timer(model, PlacementSettings(balance="measured", stages=(2, 2)), world, Sums(model)) is None
    seconds = make_block_timer(model, PlacementSettings(balance="measured"), world, Sums(model))
    assert seconds is not None
    found = seconds({block.name: block.module for block in find_blocks(model)})
    assert len(found) == 4 and min(found) > 0
    assert runs.time_blocks is measured.time_blocks


def test_a_setting_of_another_layout_is_told_of() -> None:
    plan = make_execution_plan(
        layout=parse_layout("ddp"),
        update=parse_update("sync"),
        resources=Resources(ranks=2),
        facts=JobFacts(global_batch_size=4),
    )
    told = unused_placement_notes(Settings(place=PlacementSettings(units=("Block",), stages=(1, 2))), plan)
    assert [line.split()[1] for line in told] == ["place.units", "place.stages"]
    assert unused_placement_notes(Settings(place=PlacementSettings(blocks=("a",))), plan) == []


def test_a_whole_model_is_a_plain_build_up_to_the_limit_and_by_name_beyond() -> None:
    def build() -> nn.Module:
        torch.manual_seed(3)
        return Net()

    alone = MeshGroups.from_replicas(World.alone())
    limit = tensor_bytes(build())
    below = begin.build_initial_model(build, seed=1, limit_bytes=limit, worlds=alone)
    assert not below.notes and all(map(torch.equal, below.model.parameters(), build().parameters()))
    beyond = begin.build_initial_model(build, seed=1, limit_bytes=limit - 1, worlds=alone)
    assert "above init.limit" in beyond.notes[0]
    assert not torch.equal(beyond.model.get_parameter("leave.weight"), build().get_parameter("leave.weight"))


def test_a_large_build_is_left_before_it_is_large() -> None:
    built: list[nn.Module] = []

    def build() -> nn.Module:
        for _ in range(10):
            built.append(nn.Linear(8, 8))  # 288 bytes each
        return nn.ModuleList(built)

    assert begin._build_within_limit(build, max_bytes=600) is None and len(built) == 2
    assert begin._build_within_limit(lambda: nn.Linear(8, 8), max_bytes=600) is not None
