"""Compressed gradients: the option's text, rounding and selection, and residuals that only applied steps change."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.checkpoint.error_feedback_state import ERROR_FEEDBACK, collect_error_feedback, load_error_feedback
from paceline.checkpoint.files.manifest import open_stored_files, write_files
from paceline.comm.process_group import World
from paceline.config.compression import Compression, Method, parse_compress
from paceline.errors import JobError, LayoutError
from paceline.parallel.compression.build_codec import build_compressed_reducer
from paceline.parallel.compression.codecs import Bf16, BlockScaledCodec, Codec
from paceline.parallel.compression.error_feedback_reducer import ErrorFeedbackReducer
from paceline.parallel.compression.residual_memory import DoubleBufferedTensors
from paceline.parallel.compression.topk import largest_element_indices
from paceline.parallel.module_access.parameters import trainable_parameters
from paceline.verification.reference.compressed import compress_once, keep_largest

INT8, FP16 = BlockScaledCodec(block=8, is_float=False), BlockScaledCodec(block=8, is_float=True)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("none", "none"),
        ("BF16", "bf16"),
        ("int8", "int8,block=256"),
        ("int8,block=64", "int8,block=64"),
        ("powersgd", "powersgd,rank=4"),
        ("topk, ratio=0.00123456", "topk,ratio=0.00123456"),
    ],
)
def test_words_are_read_and_said_again(text: str, wanted: str) -> None:
    found = parse_compress(text)
    assert str(found) == wanted and parse_compress(str(found)) == found


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("bf61", "did you mean 'bf16'"),
        ("zip", "the methods: bf16, fp16, int8, powersgd, topk"),
        ("bf16,rank=2", "has no option 'rank'"),
        ("topk,ration=1", "did you mean 'ratio'"),
        ("topk,ratio=0", "ratio must be a number above 0, at most 1"),
        ("topk,ratio=nan", "ratio must be a number above 0, at most 1"),
        ("topk,ratio", "ratio must be a number above 0, at most 1"),
        ("powersgd,rank=1.5", "rank must be an integer from 1 to 1,024"),
        ("int8,block=4", "block must be an integer from 8 to 65,536"),
        ("int8,block=8,block=16", "has block twice"),
    ],
)
def test_what_can_not_be_had_is_said_with_what_to_type(text: str, said: str) -> None:
    with pytest.raises(LayoutError) as caught:
        parse_compress(text)
    assert said in str(caught.value) and caught.value.hint.startswith("--compress ")


@given(seed=st.integers(0, 10**6), exponent=st.integers(-170, 120), double=st.booleans())
@settings(max_examples=60, deadline=None)
def test_what_is_packed_is_what_the_naive_words_say(seed: int, exponent: int, double: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(2, 24, generator=generator, dtype=torch.float64) * 2.0**exponent
    values = values if double else values.float()
    for method, grain in ((Method.BF16, Bf16()), (Method.FP16, FP16), (Method.INT8, INT8)):
        assert isinstance(grain, Bf16 | BlockScaledCodec)
        packed = grain.pack(values)
        assert packed.dtype == torch.uint8 and packed.shape == (2, grain.num_bytes(24))
        found = grain.unpack(packed, dtype=values.dtype)
        wanted = compress_once(values, Compression(method=method, block=8))
        assert torch.equal(found, wanted), method
        assert torch.equal(grain.unpack(grain.pack(found[:1]), dtype=values.dtype), found[:1]) or method is Method.INT8


@pytest.mark.parametrize("grain", [Bf16(), FP16, INT8], ids=["bf16", "fp16", "int8"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_not_finite_when_it_arrives(grain: Codec, value: float) -> None:
    values = torch.ones(1, 16)
    values[0, 3] = value
    found = grain.unpack(grain.pack(values), dtype=torch.float32)
    assert not torch.isfinite(found[0, 3]) and torch.isfinite(found[0, 8:]).all()


@pytest.mark.parametrize("size", [0.0, 1e-45, 1e-38, 3e38])
def test_blocks_of_the_smallest_and_largest_numbers_stay_finite(size: float) -> None:
    values = torch.full((1, 8), size)
    for grain in (FP16, INT8):
        found = grain.unpack(grain.pack(values), dtype=torch.float32)
        assert torch.isfinite(found).all()
        assert size < 1e-37 or torch.allclose(found, values, rtol=1e-2)


@given(st.lists(st.sampled_from([0.0, 1.0, -1.0, 2.0, -2.0, 0.5]), min_size=1, max_size=40), st.floats(0.01, 1.0))
@settings(max_examples=100, deadline=None)
def test_of_equal_elements_the_first_are_chosen(values: list[float], ratio: float) -> None:
    tensor, how = torch.tensor(values), Compression(method=Method.TOPK, ratio=ratio)
    places = largest_element_indices(tensor, how.num_selected(len(values)))
    kept = torch.zeros_like(tensor)
    kept[places] = tensor[places]
    order = sorted(range(len(values)), key=lambda i: (-abs(values[i]), i))[: how.num_selected(len(values))]
    assert places.tolist() == sorted(order)
    assert torch.equal(kept, keep_largest(tensor, how))


def test_nan_is_chosen_before_anything_else() -> None:
    values = torch.tensor([9.0, math.nan, 1e30, math.inf, 3.0])
    assert largest_element_indices(values, 2).tolist() == [1, 3]


def test_a_memory_changes_by_steps_that_are_taken_for_parameters_that_have_a_gradient() -> None:
    memory = DoubleBufferedTensors({"a": (2,), "b": (1, 2)}, dtype=torch.float32, device=torch.device("cpu"))
    yes, no = torch.tensor(True), torch.tensor(False)

    def step(value: float, *, is_finite: torch.Tensor, unused_names: tuple[str, ...] = ()) -> None:
        memory.add_gradients([torch.full((2,), value), torch.full((1, 2), value)])
        memory.commit(is_finite=is_finite, unused_names=unused_names)

    def now() -> list[float]:
        return [float(memory.current["a"][0]), float(memory.current["b"][0, 1])]

    memory.undo()
    step(1.0, is_finite=yes)
    assert now() == [1.0, 1.0]
    step(2.0, is_finite=yes, unused_names=("b", "of another unit"))
    assert now() == [3.0, 1.0]
    step(math.nan, is_finite=no)
    assert now() == [3.0, 1.0]
    step(4.0, is_finite=yes)
    memory.undo()
    memory.undo()
    assert now() == [3.0, 1.0], "undone once, however often it is asked for"


def replica(how: str, rank: int, ranks: int) -> ErrorFeedbackReducer:
    """One replica's reducer, which sends nothing here."""
    torch.manual_seed(0)
    named = trainable_parameters(torch.nn.Sequential(torch.nn.Linear(12, 10), torch.nn.Linear(10, 3)))
    found = build_compressed_reducer(
        parse_compress(how), named_parameters=named, world=World(rank=rank, world_size=ranks)
    )
    assert isinstance(found, ErrorFeedbackReducer)
    return found


@pytest.mark.parametrize("how", ["topk", "powersgd,rank=2"])
@pytest.mark.parametrize("now", [2, 3, 5])
def test_other_replicas_share_out_all_that_was_held_back(how: str, now: int, tmp_path: Path) -> None:
    before, listed = [replica(how, rank, 2) for rank in range(2)], dict[str, Any]()
    for rank, one in enumerate(before):
        for number, tensor in enumerate([*one.residuals.values(), *one.shared_state.values()]):
            tensor.normal_(
                generator=torch.Generator().manual_seed(number if number >= len(one.residuals) else 9 * rank)
            )
        files, said = collect_error_feedback(one)
        listed |= write_files(tmp_path, files)
    loaded: Any = SimpleNamespace(state={"held_back": said}, files=open_stored_files(tmp_path, listed))
    assert list(loaded.files) == [ERROR_FEEDBACK]
    after = [replica(how, rank, now) for rank in range(now)]
    for one in after:
        load_error_feedback(loaded, one, world=World.alone())
    for name in before[0].residuals:
        total = sum(one.residuals[name] for one in after)
        assert torch.allclose(torch.as_tensor(total), before[0].residuals[name] + before[1].residuals[name], atol=1e-5)
        assert now != 2 or all(
            torch.equal(a.residuals[name], b.residuals[name]) for a, b in zip(before, after, strict=True)
        )
    assert all(
        torch.equal(before[0].shared_state[name], after[-1].shared_state[name]) for name in before[0].shared_state
    )


def test_a_parameter_that_was_frozen_before_holds_nothing_back(tmp_path: Path) -> None:
    before, after = replica("powersgd,rank=2", 0, 2), replica("powersgd,rank=2", 0, 2)
    first = {name: tensor.clone() for name, tensor in after.shared_state.items()}
    files, said = collect_error_feedback(before)
    for name, rows in files.items():
        files[name] = [row for row in rows if "1.weight" not in row.name]
    listed = write_files(tmp_path, files)
    for tensor in [*after.residuals.values(), *before.shared_state.values()]:
        tensor.fill_(3.0)
    load_error_feedback(
        SimpleNamespace(state={"held_back": said}, files=open_stored_files(tmp_path, listed)),
        after,
        world=World.alone(),
    )  # type: ignore[arg-type]
    assert not any(tensor.any() for tensor in after.residuals.values())
    assert torch.equal(after.shared_state["1.weight"], first["1.weight"])


@pytest.mark.parametrize("how", ["topk,ratio=0.5", "powersgd,rank=1"])
def test_a_gradient_whose_sum_float32_does_not_hold_is_held_back_too(how: str) -> None:
    torch.manual_seed(0)
    named = trainable_parameters(torch.nn.Linear(40, 30))
    reducer = build_compressed_reducer(parse_compress(how), named_parameters=named, world=World.alone())
    for member in named:
        member.parameter.grad = torch.rand_like(member.parameter) * 1e36
    reducer.finish(divisor=None)
    assert isinstance(reducer, ErrorFeedbackReducer) and reducer.residuals["weight"].any()
    assert all(torch.isfinite(member.parameter.grad).all() for member in named if member.parameter.grad is not None)


@pytest.mark.parametrize("exponent", [100, -100])
def test_a_power_of_two_of_all_gradients_is_one_of_all_that_comes_of_them(exponent: int) -> None:
    found = []
    for scale in (1.0, 2.0**exponent):
        named = trainable_parameters(torch.nn.Linear(40, 30))
        reducer = build_compressed_reducer(
            parse_compress("powersgd,rank=3"), named_parameters=named, world=World.alone()
        )
        for step in range(3):
            generator = torch.Generator().manual_seed(step)
            for member in named:
                member.parameter.grad = torch.randn(member.parameter.shape, generator=generator) * scale
            reducer.finish(divisor=None)
        found.append(named[0].parameter.grad)
    assert found[0] is not None and found[1] is not None
    assert torch.allclose(found[0], found[1] * 2.0**-exponent, rtol=1e-4, atol=1e-5)


def test_numbers_that_have_no_such_rounding_are_refused_by_name() -> None:
    model = torch.nn.ParameterDict({"wave": torch.nn.Parameter(torch.zeros(3, dtype=torch.complex64))})
    with pytest.raises(JobError, match="wave is complex64"):
        build_compressed_reducer(
            parse_compress("bf16"), named_parameters=trainable_parameters(model), world=World(world_size=2)
        )
