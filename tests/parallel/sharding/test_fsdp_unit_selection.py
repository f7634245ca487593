"""Which modules a fully sharded model groups into units."""

from typing import Any

import pytest
import torch
from torch import nn

from paceline.comm.process_group import World
from paceline.errors import LayoutError
from paceline.parallel.module_access.parameters import trainable_parameters
from paceline.parallel.sharding.fsdp_options import FullShardOptions
from paceline.parallel.sharding.fully_sharded import shard_zero3
from paceline.parallel.sharding.sharded_model import DataGroups
from paceline.parallel.sharding.units import UnitChoice, find_units
from tests.parallel.sharding.sharding_ranks import Block, Gpt, llama


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU())


def resnet() -> nn.Module:
    stages = [nn.Sequential(Residual(4), Residual(4)), nn.Sequential(Residual(4), Residual(4), Residual(4))]
    return nn.Sequential(nn.Conv2d(3, 4, 3), *stages, nn.Flatten(), nn.Linear(4, 2))


def names(model: nn.Module, **asked: Any) -> set[str]:
    return set(find_units(model, choice=UnitChoice(**asked)))


def test_repeated_blocks_are_found() -> None:
    assert names(Gpt()) == {"blocks.0", "blocks.1"}
    assert names(llama()) == {"model.layers.0", "model.layers.1"}
    assert names(resnet()) == {"1", "2"}
    assert names(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2))) == set()


def test_by_class_by_name_by_size() -> None:
    assert names(Gpt(), classes=["Linear"]) == {
        f"blocks.{block}.{part}" for block in (0, 1) for part in ("up", "down", "mix")
    }
    assert names(Gpt(), names=["blocks.1"]) == {"blocks.1"}
    assert names(Gpt(width=6), min_numel=120) == {"blocks.0", "blocks.0.up", "blocks.1", "blocks.1.up"}
    assert names(Gpt(width=6), min_numel=250) == {"blocks.0", "blocks.1"}


def test_inner_units_come_before_those_around_them() -> None:
    found = list(find_units(Gpt(), choice=UnitChoice(classes=["Block"], names=["blocks.*.up"])))
    assert found.index("blocks.0.up") < found.index("blocks.0")


def test_a_weight_shared_over_units_is_the_models_own() -> None:
    model = Gpt(blocks=4)
    model.blocks[2].mix.weight = model.blocks[0].mix.weight
    assert names(model) == {"blocks.1", "blocks.3"}
    model.blocks[3].down.bias = model.embed.weight
    assert names(model) == {"blocks.1"}


def test_a_block_used_twice_is_one_unit_at_most() -> None:
    block = Block(4)
    assert len(names(nn.Sequential(block, Block(4), block))) <= 2


@pytest.mark.parametrize(
    ("asked", "says"), [({"classes": ["Blok"]}, "class 'Blok'"), ({"names": ["layer.*"]}, "layer")]
)
def test_a_unit_that_is_not_there_is_refused(asked: Any, says: str) -> None:
    with pytest.raises(LayoutError, match=says):
        names(Gpt(), **asked)


def test_one_rank_has_nothing_to_offload_or_to_cast() -> None:
    alone = DataGroups(all_ranks=World.alone(), shard_world=World.alone())
    for asked in (FullShardOptions(offload=True), FullShardOptions(param_dtype=torch.bfloat16)):
        model = Gpt()
        with pytest.raises(LayoutError, match="on one rank"):
            shard_zero3(model, named_parameters=trainable_parameters(model), data_groups=alone, options=asked)
