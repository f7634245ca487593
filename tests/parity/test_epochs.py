"""Where an epoch ends: its short batch, and what can be read once."""

from contextlib import closing
from typing import Any

import pytest

from paceline.errors import DataError, UsageError
from paceline.feed.feed import make_feed
from paceline.feed.types import Cut
from paceline.order.cursor import Cursor
from tests.parity.test_feed import Noisy, Stream

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


def test_an_epoch_shorter_than_a_batch_is_not_left_out_altogether() -> None:
    def first(data: Any, size: int) -> int:
        cut = Cut(global_batch_size=size, micro_batch_size=5, drop_last=True)
        with closing(make_feed(data=data, seed=3, cut=cut, cursor=Cursor(), order=None, collate=None)) as feed:
            return next(iter(feed)).batch.num_samples

    assert first(Noisy(), 45) == first(Stream(), 45) == 45
    with pytest.raises(UsageError, match="an epoch has 45 samples, and a global batch 46") as refused:
        first(Noisy(), 46)
    assert "--data.drop_last false" in refused.value.hint
    with pytest.raises(DataError, match="shorter than a global batch of 46, which data"):
        first(Stream(), 46)
