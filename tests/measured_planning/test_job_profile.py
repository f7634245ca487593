"""The numbers traced from a job's model, and `paceline plan` from the job to the answer."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from paceline.commands.common.execution import RunOptions, make_task
from paceline.measured_planning.profile.profile_job import profile_model
from paceline.measured_planning.profile.truncated_model import named_blocks
from paceline.planner.model_costs.decoder_profile import Decoder, build_decoder_profile
from paceline.planner.model_costs.model_profile import ModelProfile
from paceline.planner.model_costs.training_flops import model_flops
from paceline.profiling.model_tracing.fake_execution import FakeExecutionMode
from paceline.trainer.setup.prepare import prepare
from tests import zoo

pytestmark = pytest.mark.one_worker  # what they share is made once
ROOT = Path(__file__).resolve().parents[2]


def facts_of(job: str, *typed: str) -> ModelProfile:
    task = make_task("plan", job, RunOptions(layout="single", ranks=1, device="cpu", quiet=True), list(typed))
    ready = prepare(task)
    return profile_model(ready.job, ready.settings, max_ranks=2)


@pytest.fixture(scope="module")
def llama() -> ModelProfile:
    return facts_of("tests.zoo:llama")


def test_a_decoder_is_traced_to_the_numbers_of_its_formulas(llama: ModelProfile) -> None:
    layers = len(llama.blocks)
    built = zoo.llama().model()
    config: Any = built.config
    sizes = Decoder(
        layers=layers,
        width=config.hidden_size,
        mlp_width=config.intermediate_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        vocabulary=config.vocab_size,
    )
    known = build_decoder_profile(
        sizes, name="", length=llama.length, global_batch_size=llama.global_batch_size, precision="fp32"
    )
    assert config.hidden_size == zoo.WIDTH and layers == config.num_hidden_layers
    assert llama.parameters == sum(p.numel() for p in built.parameters()) == known.parameters
    for own, other in zip(llama.parts, known.parts, strict=True):
        assert own.whole_parameters == other.whole_parameters
        assert own.split_parameters == other.split_parameters
        assert own.lookup_parameters == other.lookup_parameters
        at = {"samples": 3, "length": llama.length}
        assert own.masked_flops.evaluate(**at) == pytest.approx(other.masked_flops.evaluate(**at))
    for own, other in zip(llama.blocks, known.blocks, strict=True):
        at = {"samples": 3, "length": llama.length}
        assert own.matmul_flops.evaluate(**at) == pytest.approx(other.matmul_flops.evaluate(**at))
        assert own.attention_flops.evaluate(**at) == pytest.approx(other.attention_flops.evaluate(**at))
        assert own.output_bytes.evaluate(**at) == other.output_bytes.evaluate(**at)
        # the closed form knows no mask and reads a norm's input once: what is seen is never less
        assert 1 <= own.fused_bytes.evaluate(**at) / other.fused_bytes.evaluate(**at) < 1.25
        assert own.fused_bytes.evaluate(**at) < 0.5 * own.moved_bytes.evaluate(**at)
    assert model_flops(llama) == pytest.approx(model_flops(known))
    assert llama.optimizer.state_bytes == pytest.approx(8, rel=0.02)
    assert llama.tp_sizes == (2,) and llama.cp_sizes == (2,)


def test_what_a_model_can_not_have_is_said_with_its_reason() -> None:
    found = facts_of("tests.zoo:digits")
    assert found.tp_sizes == () and "tp" in found.refused and found.cp_sizes == ()
    assert {"cp", "ep"} <= set(found.refused) and not found.compiles


def test_each_part_has_its_own_frozen_weights() -> None:
    task = make_task("plan", "tests.zoo:text", RunOptions(layout="single", ranks=1, device="cpu", quiet=True), [])
    ready = prepare(task)

    def frozen() -> nn.Module:
        model = ready.job.model()
        next(iter(named_blocks(model).values())).requires_grad_(False)
        return model

    found = profile_model(replace(ready.job, model=frozen), ready.settings, max_ranks=1)
    first, *others = found.blocks
    assert first.frozen_parameters == first.parameters > 0
    assert not any(part.frozen_parameters for part in (found.first, *others, found.last))


def test_who_compiles_is_planned_with_compiled_blocks() -> None:
    found = facts_of("tests.zoo:digits", "--train.compile", "true")
    assert found.compiles and {"tp", "remat=selective"} <= set(found.refused)


def test_experts_are_counted_apart() -> None:
    found = facts_of("tests.zoo:mixtral")
    assert all(block.expert_parameters > 0 for block in found.blocks)
    assert found.ep_sizes and not found.refused.get("ep")


def test_draws_that_are_repeated_until_they_are_within_bounds_end() -> None:
    with FakeExecutionMode() as hollow:
        hollow.comparisons_are_true = False
        weight = nn.init.trunc_normal_(torch.empty(300, 300), std=0.02)
        hollow.comparisons_are_true = True
        product = F.linear(weight, weight)
        assert product.shape == (300, 300) and bool(torch.isfinite(product).all())


def plan(*words: str, folder: Path) -> Any:
    command = [sys.executable, "-m", "paceline", "plan", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)


def test_the_command_answers_with_its_fixed_keys(tmp_path: Path) -> None:
    words = ["--cluster", "2xH100-80G", "--json", "--train.micro_batch_size", "2"]
    done = plan(f"{ROOT / 'tests' / 'zoo.py'}:llama", *words, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert {row["settings"]["train.micro_batch_size"] for row in answer["plans"] if row["fits"]} == {"2"}
    assert answer["case"] == 1 and answer["recommended"] == answer["plans"][0]["layout"]
    best = answer["plans"][0]
    tokens = best["tokens_per_second_per_device"]
    assert tokens == pytest.approx(zoo.BATCH * zoo.LENGTH / best["step_seconds"] / 2) and 0 < best["mfu"] < 1
    assert answer["links"]["inside a node"]["origin"] == "assumed" and answer["peak_flops_per_second"] == 67e12
    assert answer["reserve"] == {"bytes": 2 << 30, "origin": "assumed"}
    assert [option["option"] for option in answer["options"]] == ["params=bf16", "--train.compile true"]
    assert best["fits"] and best["replayed"] and best["step_seconds"] > 0 and best["why"]
    assert best["peak_bytes"] == sum(
        best["parts"][name] for name in ("parameters", "gradients", "optimizer", "buffers", "activations", "reserve")
    )


def test_a_device_that_is_too_small_changes_the_choice(tmp_path: Path) -> None:
    small = (
        "nodes = 1\ndevices = 4\ninside = 'pcie4'\n[device]\nname = 'small'\nmemory = '640 KiB'\nreserve = '1 B'\n"
        "bandwidth = '100 GB/s'\nfp32 = '1 TFLOP/s'\nbf16 = '1 TFLOP/s'\n"
    )
    (tmp_path / "small.toml").write_text(small)
    (tmp_path / "large.toml").write_text(small.replace("640 KiB", "13 MiB"))
    found = {}
    for name in ("small", "large"):
        done = plan(f"{ROOT / 'tests' / 'zoo.py'}:llama", "--cluster", f"{name}.toml", "--json", folder=tmp_path)
        assert done.returncode == 0, done.stderr + done.stdout
        found[name] = json.loads(done.stdout)
    assert found["large"]["case"] == 1 and found["small"]["case"] > 1
    assert found["small"]["plans"][0]["peak_bytes"] <= 640 << 10
    assert found["small"]["recommended"] != found["large"]["recommended"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--cluster", "8xH1000"], "H100"),
        (["--cluster", "nowhere.toml"], "nowhere.toml"),
        (["--cluster", "8xH100-80G", "--train.precison", "bf16"], "train.precision"),
    ],
)
def test_bad_input_is_refused_before_anything_runs(words: list[str], said: str, tmp_path: Path) -> None:
    done = plan(f"{ROOT / 'tests' / 'zoo.py'}:llama", *words, folder=tmp_path)
    assert done.returncode == 2 and said in done.stderr and "to do:" in done.stderr
    assert not (tmp_path / "runs").exists()
