"""The console lines of a run before its first step."""

import pytest

from tests.conftest import Shop

SPLIT = ["fsdp", *(pytest.param(layout, marks=pytest.mark.soak) for layout in ("ddp", "zero1", "pp", "threads"))]


@pytest.mark.parametrize("layout", SPLIT)
def test_the_model_is_told_whole_however_it_is_split(shop: Shop, layout: str) -> None:
    ended = shop.train("run", "--layout", layout, steps=1)
    assert ended.code == 0 and "model: 212 trainable parameters" in ended.text, ended.text
