"""The text of `remat=`, and which operations a recomputation may skip."""

import pytest
import torch

from paceline.config.activation_checkpointing import RematKind, parse_remat
from paceline.errors import LayoutError
from paceline.parallel.activation_checkpointing.saved_ops import SAVED_OPERATIONS, is_random_call


@pytest.mark.parametrize("text", ["none", "full", "every:2", "selective", "selective:mm+bmm"])
def test_what_is_read_is_what_is_written(text: str) -> None:
    assert str(parse_remat(text)) == text


def test_what_is_read() -> None:
    assert parse_remat(" Every:3 ").every == 3
    assert parse_remat("selective:mm+my.op").keep == ("mm", "my.op")
    assert not parse_remat("none").is_on and parse_remat("full").kind is RematKind.FULL


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("ful", "full"),
        ("every", "got ''"),
        ("every:0", "got '0'"),
        ("every:-1", "got '-1'"),
        ("full:2", "takes no option"),
        ("selective:", "takes no option"),
        ("selective:mm+", "takes no option"),
    ],
)
def test_what_is_refused(text: str, said: str) -> None:
    with pytest.raises(LayoutError) as caught:
        parse_remat(text)
    assert said in str(caught.value) and caught.value.hint


def test_attention_with_dropout_is_run_again() -> None:
    q = torch.zeros(1, 1, 2, 8)
    flash = torch.ops.aten._scaled_dot_product_flash_attention.default
    assert is_random_call(flash, (q, q, q, 0.1), {}) and is_random_call(flash, (q, q, q), {"dropout_p": 0.1})
    assert not is_random_call(flash, (q, q, q), {}) and not is_random_call(flash, (q, q, q, 0.0, True), {})
    assert not is_random_call(torch.ops.aten.mm.default, (q, q), {})
    assert is_random_call(torch.ops.aten.bernoulli.default, (q,), {})


def test_our_own_list_names_operations_of_this_torch() -> None:
    missing = [name for name in SAVED_OPERATIONS if not hasattr(torch.ops.aten, name)]
    assert missing == []
