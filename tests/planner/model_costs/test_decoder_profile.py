"""A decoder's profile against published sizes and the formulas of the papers."""

import json

import pytest

from paceline.planner.model_costs.decoder_profile import Decoder, build_decoder_profile
from paceline.planner.model_costs.model_profile import model_profile_from_json

_PUBLISHED = {
    "Llama-3 8B": (Decoder(layers=32, width=4096, mlp_width=14336, heads=32, kv_heads=8, vocabulary=128256), 8_030_261_248),
    "Llama-3 70B": (Decoder(layers=80, width=8192, mlp_width=28672, heads=64, kv_heads=8, vocabulary=128256), 70_553_706_496),
    "Llama-3 405B": (Decoder(layers=126, width=16384, mlp_width=53248, heads=128, kv_heads=8, vocabulary=128256), 405_853_388_800),
    "Llama-2 7B": (Decoder(layers=32, width=4096, mlp_width=11008, heads=32, vocabulary=32000), 6_738_415_616),
    "Llama-3.2 1B": (
        Decoder(layers=16, width=2048, mlp_width=8192, heads=32, kv_heads=8, vocabulary=128256, is_tied=True),
        1_235_814_400,
    ),
    "Mixtral 8x7B": (
        Decoder(layers=32, width=4096, mlp_width=14336, heads=32, kv_heads=8, vocabulary=32000, experts=8, active=2),
        46_702_792_704,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", _PUBLISHED)
def test_parameters_are_those_that_were_published(name: str) -> None:
    sizes, parameters = _PUBLISHED[name]
    facts = build_decoder_profile(sizes, name=name, length=2048, global_batch_size=8)
    assert facts.parameters == parameters
    assert model_profile_from_json(json.loads(json.dumps(facts.as_json()))) == facts


@pytest.mark.parametrize(
    ("width", "heads", "length", "samples"), [(64, 4, 16, 1), (12288, 96, 2048, 1), (4096, 32, 128, 3)]
)
def test_activations_are_those_of_korthikanti(width: int, heads: int, length: int, samples: int) -> None:
    sizes = Decoder(
        layers=1, width=width, mlp_width=4 * width, heads=heads, vocabulary=10, is_gated=False, has_dropout=True
    )
    block = build_decoder_profile(sizes, name="x", length=length, global_batch_size=1, residual_bytes=2).blocks[0]
    kept = block.saved_bytes.evaluate(samples=samples, length=length)
    kept += block.split_saved_bytes.evaluate(samples=samples, length=length) - block.split_saved_bytes.fixed
    tokens = samples * length
    assert kept == 34 * tokens * width + 5 * heads * length * tokens
    fused = kept - block.attention_saved_bytes.evaluate(samples=samples, length=length)
    assert fused == 34 * tokens * width


def test_operations_are_six_for_each_parameter_and_token() -> None:
    sizes, parameters = _PUBLISHED["Llama-3 70B"]
    facts = build_decoder_profile(sizes, name="x", length=8192, global_batch_size=8)
    products = sum(part.matmul_flops.evaluate(samples=1, length=8192) for part in facts.parts)
    inputs = sizes.vocabulary * sizes.width  # the embedding is no product
    assert 3 * products == pytest.approx(6 * (parameters - inputs) * 8192, rel=1e-4)
    attention = sum(part.attention_flops.evaluate(samples=1, length=8192) for part in facts.parts)
    assert attention == 0.5 * 4 * sizes.layers * sizes.width * 8192**2


def test_sizes_that_tp_cp_and_ep_can_have() -> None:
    facts = build_decoder_profile(_PUBLISHED["Mixtral 8x7B"][0], name="x", length=10, global_batch_size=8)
    assert facts.tp_sizes == (2, 4, 8) and facts.cp_sizes == (2, 4) and facts.ep_sizes == (2, 4, 8)
    assert build_decoder_profile(_PUBLISHED["Llama-2 7B"][0], name="x", length=1, global_batch_size=8).cp_sizes == ()


def test_experts_cost_what_their_active_ones_do() -> None:
    dense = Decoder(layers=1, width=64, mlp_width=256, heads=4, vocabulary=10)
    routed = Decoder(layers=1, width=64, mlp_width=256, heads=4, vocabulary=10, experts=8, active=1)
    one, other = (build_decoder_profile(s, name="x", length=8, global_batch_size=1).blocks[0] for s in (dense, routed))
    assert other.expert_parameters == 8 * 3 * 64 * 256
    router = 2 * 64 * 8 * 8
    assert other.matmul_flops.evaluate(samples=1, length=8) - router == one.matmul_flops.evaluate(samples=1, length=8)
