"""Every function with a tensor rule, in every spelling of its calls, on sharded tensors against plain torch."""

import pytest
import torch

from paceline.parallel.tensor_parallel.sharded_tensor import RULES
from paceline.torch_internals.function_signatures import SIGNATURES, bind_arguments
from tests.parallel.tensor_parallel.rule_arguments import cases
from tests.parallel.tensor_parallel.rule_calls import Count, Cuttable, draw, is_taken, spellings

REFUSED = {"written part cut0"}  # a write through a view of the whole, of which the pieces know nothing
X = torch.ones(2, 3)


def counted(every: int) -> Count:
    count = Count()
    for number, spelling in enumerate(cases(every=every)):
        count.add(spelling, ranks=2 + number % 2, fused=number % 5 == 0)
    print(count)
    return count


def sound(count: Count) -> None:
    assert count.wrong == []
    assert {words.split(" on ")[0] for words in count.refused} <= REFUSED


def test_some_spellings_of_every_function_are_plain_torch() -> None:
    count = counted(80)
    assert count.calls > 400 and len(count.functions) > 250
    sound(count)


@pytest.mark.soak
def test_all_spellings_of_every_function_are_plain_torch() -> None:
    count = counted(1)
    assert count.calls > 20_000 and set(SIGNATURES) - count.functions <= {"arange", "t"}
    sound(count)


def test_a_rule_that_reads_a_call_wrongly_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """`flip(1, 2)` read as `flip(1)`: the dimension that is cut is then turned within each piece."""
    right = RULES["flip"]

    def first_alone(call):  # type: ignore[no-untyped-def]
        call.arguments["dims"] = call["dims"][:1]
        return right(call)

    monkeypatch.setitem(RULES, "flip", first_alone)
    count = Count()
    for spelling in filter(is_taken, spellings("flip", {"input": Cuttable(draw(4, 6, 5), 2), "dims": (1, 2)})):
        count.add(spelling, ranks=2)
    assert count.wrong and all("flip" in words for words in count.wrong)


@pytest.mark.parametrize(
    ("name", "args", "kwargs", "given"),
    [
        ("flip", (X, 1, 2), {}, {"dims": (1, 2)}),
        ("flip", (X, [1, 2]), {}, {"dims": (1, 2)}),
        ("flip", (), {"input": X, "dims": 1}, {"dims": (1,)}),
        ("std", (X, False), {}, {"unbiased": False}),
        ("std", (X, 0), {}, {"dim": 0, "unbiased": True}),
        ("sum", (X,), {"axis": 1, "keepdims": True}, {"dim": 1, "keepdim": True}),
        ("split", (X,), {"dim": 1, "split_size": 4}, {"split_size": 4, "dim": 1}),
        ("torch.split", (), {"tensor": X, "split_size_or_sections": [1, 2]}, {"split_size": [1, 2], "dim": 0}),
        ("softmax", (X, 1, torch.float64), {}, {"dim": 1, "dtype": torch.float64}),
        ("max", (X,), {"other": X}, {"other": X}),
        ("sum", (X,), {"out": X}, None),
        ("view", (X, torch.int32), {}, None),
        ("flip", (X, True), {}, None),
        ("transpose", (X, 0), {}, None),
        ("sum", (X, 0), {"dim": 0}, None),
        # calls whose arguments have equal types, and differ in the types of the elements, or in their place
        ("sum", (X, (0, 1)), {}, {"dim": (0, 1)}),
        ("sum", (X, (0.5, 1)), {}, None),
        ("sum", (X,), {"dim": [0]}, {"dim": [0]}),
        ("sum", (X,), {"dim": [None, "x"]}, None),
        ("view", (X, 2, 3), {}, {"size": (2, 3)}),
        ("view", (X, (2, 3)), {}, {"size": (2, 3)}),
    ],
)
def test_a_call_is_read_by_name(name: str, args: tuple[object, ...], kwargs: dict[str, object], given: object) -> None:
    found = bind_arguments(name.removeprefix("torch."), args, kwargs)
    if not isinstance(given, dict):
        assert found is None
    else:
        assert found is not None and all(found[key] is value or found[key] == value for key, value in given.items())
