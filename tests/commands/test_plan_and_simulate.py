"""`plan` and `simulate`: named layouts, plans in files, and Hugging Face configs as jobs."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.cli import main
from paceline.commands.common import hf_config_as_job as bare
from paceline.commands.common.execution import RunOptions, make_task
from paceline.commands.common.hf_config_as_job import JOB, config_as_job, is_hf_config
from paceline.commands.simulate import simulate
from paceline.errors import MachineError, PacelineError
from paceline.measured_planning.profile.profile_job import profile_model
from paceline.planner.hardware.parse_cluster import parse_cluster
from paceline.run_folder.plan_file import read_advice
from paceline.trainer.setup.prepare import prepare
from tests.planner.advice.test_named_layouts import answer, made

ROOT = Path(__file__).resolve().parents[2]
SMALL = {"vocab_size": 100, "num_hidden_layers": 4, "num_attention_heads": 4, "hidden_size": 32}
CONFIGS: dict[str, dict[str, Any]] = {
    "LlamaConfig": {**SMALL, "intermediate_size": 64, "num_key_value_heads": 2, "max_position_embeddings": 64},
    "BertConfig": {**SMALL, "intermediate_size": 64, "max_position_embeddings": 32},
    "ViTConfig": {**SMALL, "intermediate_size": 64, "image_size": 16, "patch_size": 8},
    "T5Config": {"vocab_size": 100, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4},
}


def paceline(*words: str, folder: Path) -> Any:
    command = [sys.executable, "-m", "paceline", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)


def saved(kind: str, folder: Path) -> Path:
    """A folder with a config and nothing else."""
    transformers = pytest.importorskip("transformers")
    given = {name: value for name, value in CONFIGS[kind].items() if kind != "ViTConfig" or name != "vocab_size"}
    getattr(transformers, kind)(**given).save_pretrained(folder / kind)
    assert [path.name for path in (folder / kind).iterdir()] == ["config.json"]
    return folder / kind


def test_layouts_that_are_named_are_replayed_told_apart_and_kept(tmp_path: Path) -> None:
    (tmp_path / "before").mkdir()
    told = answer(made(), "fsdp,remat=full")
    (tmp_path / "before" / "plan.json").write_text(json.dumps(told))
    job = f"{ROOT / 'tests' / 'zoo.py'}:llama"
    done = paceline(
        "plan", job, "--cluster", "2xH100-80G", "--layouts", "ddp", "pp=2", "tp=3", "--json",
        "--run-dir", "run", "--page", "plan.html", "--against", "before", folder=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [plan["layout"] for plan in found["plans"]] == ["ddp", "pp", "tp=3"]
    assert all(plan["replayed"] and plan["fits"] for plan in found["plans"][:2])
    assert sum(found["plans"][0]["parts"].values()) == found["plans"][0]["peak_bytes"]
    assert "needs 3 ranks" in found["plans"][2]["why"]
    assert found["differences"][0][1].startswith("changed: pp 1 -> 2")
    assert found["against"][0] == "cluster: 8 × H100-80G -> 2 × H100-80G"
    assert "1f1b · 2 ranks" in (tmp_path / "plan.html").read_text()
    kept = read_advice(tmp_path / "run")
    assert kept == {name: found[name] for name in kept} and {"case", "recommended", "plans", "facts"} <= set(kept)
    step = simulate(tmp_path / "run", layout="pp=2").value
    assert step is not None and step["layout"] == "pp"
    assert step["seconds"]["bubble"] > 0 and step["tokens_per_second"] > 0


@pytest.mark.parametrize("cluster", ["here", "2xH100-80G"])
def test_where_no_layout_can_be_had_nothing_is_started(cluster: str, tmp_path: Path) -> None:
    """All of them are told. With one that can be had the others stand beside it, as above."""
    job, ranks = f"{ROOT / 'tests' / 'zoo.py'}:llama", ["--ranks", "2"] if cluster == "here" else []
    words = ["plan", job, "--cluster", cluster, *ranks, "--layouts", "tp=3", "threads"]
    done = paceline(*words, "--run-dir", "run", folder=tmp_path)
    assert done.returncode == 2 and not (tmp_path / "run").exists()
    assert "1. tp=3 needs 3 ranks, you have 2." in done.stderr and "2. threads are replicas" in done.stderr
    assert paceline(*words, "ddp", "--dry-run", folder=tmp_path).returncode == 0


def test_a_folder_with_a_config_is_a_job(tmp_path: Path) -> None:
    saved("LlamaConfig", tmp_path)
    words = ["--cluster", "2x2xH100-80G", "--layout", "fsdp", "--job.length", "48", "--train.precision", "bf16"]
    done = paceline("simulate", "LlamaConfig", *words, "--failures", "50000 h", "--json", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["layout"] == "fsdp" and found["ranks"] == 4
    assert found["tokens_per_second"] == pytest.approx(48 * found["samples_per_second"])
    assert found["samples_per_second"] * found["step_seconds"] == pytest.approx(8 * 4)  # 8 a device
    assert found["failures"]["best"]["useful"] > 0.9


@pytest.mark.parametrize("kind", list(CONFIGS))
def test_what_a_config_says_is_learnt_without_weights(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    job, words, assumed = config_as_job(str(saved(kind, tmp_path)), ["--job.length", "16"], ranks=2)
    assert job == JOB and "--train.global_batch_size 16" in assumed[0] and "job.length" not in assumed[0]
    ready = prepare(make_task("plan", job, RunOptions(layout="single", ranks=1, device="cpu", quiet=True), words))
    facts = profile_model(ready.job, ready.settings, max_ranks=1)
    torch.manual_seed(0)
    model = ready.job.model()
    assert facts.parameters == sum(p.numel() for p in model.parameters())
    assert facts.global_batch_size == 16 and facts.length == (1 if kind == "ViTConfig" else 16)
    assert facts.optimizer.state_bytes == pytest.approx(8, rel=0.02) and facts.name
    assert len(facts.blocks) == CONFIGS[kind].get("num_hidden_layers", 4)


def test_without_transformers_a_config_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bare, "find_spec", lambda name: None)
    with pytest.raises(MachineError, match="transformers is not installed"):
        config_as_job("transformers:LlamaConfig", [], ranks=2)
    assert config_as_job("job.py", [], ranks=2)[0] == "job.py"


def test_words_that_are_a_config_and_words_that_are_a_job(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    assert is_hf_config("transformers:LlamaConfig") and is_hf_config("transformers.LlamaForCausalLM")
    assert is_hf_config("mine.py:tiny_config") and is_hf_config("my.models:TinyConfig")
    assert not is_hf_config("job.py") and not is_hf_config("pkg.module:name") and not is_hf_config(str(tmp_path))
    assert config_as_job("job.py", ["--seed", "1"], ranks=2) == ("job.py", ["--seed", "1"], [])
    assert config_as_job("transformers.LlamaConfig", [], ranks=2)[1][0] == "--job.source=transformers:LlamaConfig"


def test_a_config_is_planned_in_the_precision_in_which_such_models_are_trained(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    job, words, said = config_as_job("transformers:LlamaConfig", [], ranks=2)
    assert job == JOB and "--train.precision=bf16" in words
    assert "--train.precision bf16 (mixed: " in said[0] and "--train.precision fp32 for float32 only" in said[0]
    for device, precision in (("H100-80G", "bf16"), ("T4", "fp16"), ("cpu", "bf16")):
        own = config_as_job("transformers:LlamaConfig", [], ranks=1, cluster=parse_cluster(f"3x{device}"))[1]
        assert f"--train.precision={precision}" in own and "--train.global_batch_size=24" in own
    fleet = parse_cluster("T4")
    wide = replace(fleet, device=replace(fleet.device, flops_per_second={"fp32": 1e12}))
    assert "--train.precision=fp32" in config_as_job("transformers:LlamaConfig", [], ranks=2, cluster=wide)[1]
    (tmp_path / "run.toml").write_text("[train]\nprecision = 'fp16'\nglobal_batch_size = 24\n[job]\nlength = 48\n")
    typed = (["--train.precision", "fp32"], ["--train.precision=fp32", "--train.global_batch_size=8", "--job.length=4"])
    for more, file in ((typed[0], None), (typed[1], None), ([], tmp_path / "run.toml")):
        _, own, lines = config_as_job("transformers:LlamaConfig", more, ranks=2, file=file)
        assert own[-len(more) or len(own) :] == more and "precision" not in lines[0]
        assert ("global_batch_size" in lines[0]) == (more == typed[0])
        common = RunOptions(layout="single", ranks=1, device="cpu", quiet=True, config=file)
        settings = make_task("plan", JOB, common, own).settings
        assert settings["train.precision"] == ("fp16" if file else "fp32")
        assert int(settings["train.global_batch_size"]) == {0: 24, 2: 16, 3: 8}[len(more)]


def test_the_file_of_a_config_stands_for_its_folder(tmp_path: Path) -> None:
    folder = saved("LlamaConfig", tmp_path)
    assert is_hf_config(str(folder / "config.json")) and not is_hf_config(str(tmp_path / "config.json"))
    assert config_as_job(str(folder / "config.json"), [], ranks=2) == config_as_job(str(folder), [], ranks=2)


@pytest.mark.parametrize(
    ("source", "words", "said"),
    [
        ("transformers:LlammaConfig", {}, "transformers has no LlammaConfig"),
        ("transformers:PreTrainedModel", {}, "transformers:PreTrainedModel"),
        ("transformers:BertConfig", {"optimizer": "Adamm"}, "torch.optim has no Adamm"),
        ("transformers:BertConfig", {"task": "image-classification"}, "transformers has no Bert for image"),
        ("folder", {}, "config.json can't be read"),
    ],
)
def test_a_config_that_is_none_is_refused(source: str, words: dict[str, str], said: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from paceline.hf.config_only_job import make_job

    (tmp_path / "config.json").write_text('{"model_type": "llamba"}')
    with pytest.raises(PacelineError) as refused:
        make_job(str(tmp_path) if source == "folder" else source, **words)  # type: ignore[arg-type]
    assert said in str(refused.value) and refused.value.hint


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["plan", "job.py", "--layout", "fsdp", "--layouts", "ddp"], "contradict each other"),
        (["plan", "job.py", "--layouts", "ddp", "ddp"], "names ddp twice"),
        (["plan", "job.py", "--layouts", "ddp", "fspd"], "fsdp"),
        (["plan", "job.py", "--against", "nowhere"], "there is no plan in nowhere"),
        (["plan", "empty", "--cluster", "8xH100-80G"], "is a folder without config.json"),
        (["simulate", "job.py", "--cluster", "8xH1000"], "H100"),
        (["simulate", "nowhere.json"], "there is no plan in nowhere.json"),
        (["simulate", "job.py", "--failures", "50000"], "has no unit"),
    ],
)
def test_bad_words_are_refused_before_anything_runs(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "job.py").write_text("def make_job():\n    raise SystemExit(9)\n")
    monkeypatch.chdir(tmp_path)
    code, told = main(words), capsys.readouterr()
    assert code == 2 and said in told.err and "to do:" in told.err, told.err
    assert not (tmp_path / "runs").exists()
