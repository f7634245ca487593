"""Jobs from Hugging Face configs and folders train alike on any number of ranks and read weights by shard."""

import math
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import paceline as pl
from paceline.comm.process_group import World
from paceline.errors import CheckpointError, JobError
from paceline.parallel.initialization.deferred_init import defer_init, fill_model
from paceline.parallel.initialization.meta_model import named_tensors, record_model
from paceline.parallel.initialization.safetensors_loading import load_shards
from paceline.parallel.module_access.shard_spec import ShardSpec, shard_rows
from paceline.step.loss.loss_return_value import LossContract
from paceline.torch_internals.rng import seed_all, stream_key
from tests import zoo
from tests.conftest import Shop

FAMILIES = ["llama", "gpt2", "bert", "t5", "vit", "mixtral"]
MAKERS = {
    "llama": zoo.padded_causal,
    "gpt2": zoo.causal,
    "bert": zoo.masked,
    "t5": zoo.translated,
    "vit": zoo.pictures,
    "mixtral": zoo.causal,
}


def config_of(family: str) -> Any:
    return zoo.JOBS[family]().model().config


def job_of(family: str, source: Any = None, **more: Any) -> pl.Job:
    given = {"train_data": zoo.Rows(MAKERS[family]), "global_batch_size": 8, "lr": 1e-3, **more}
    return pl.hf.job(source or config_of(family), **given)


def saved(family: str, folder: Path) -> nn.Module:
    torch.manual_seed(5)
    model: Any = zoo.JOBS[family]().model()
    model.save_pretrained(folder, max_shard_size="60KB")
    return model


def plain(job: pl.Job) -> nn.Module:
    seed_all(stream_key(0, "build"))
    return job.model()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_config_gives_a_job_that_learns(family: str) -> None:
    job = job_of(family)
    model = plain(job)
    contract = LossContract(job=job, model=model)
    optimizer = job.optimizer([(n, p) for n, p in model.named_parameters()])
    assert isinstance(optimizer, torch.optim.AdamW) and job.collate is not None
    batch = job.collate([job.train_data[i] for i in range(8)])
    losses = []
    for _ in range(3):
        output = contract.forward(model, batch)
        assert getattr(output, "past_key_values", None) is None, "a cache was kept"
        total, count = contract.terms(output, batch, num_samples=8)["loss"]
        optimizer.zero_grad()
        (total / count).backward()
        optimizer.step()
        losses.append(float((total / count).detach()))
    assert losses[2] < losses[1] < losses[0] < math.log(zoo.VOCAB) + 1
    assert all(p.grad is not None for p in model.parameters())
    assert type(model) is type(zoo.JOBS[family]().model())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folders_weights_are_read_in_parts(family: str, tmp_path: Path) -> None:
    like = named_tensors(saved(family, tmp_path))
    job = job_of(family, tmp_path)
    whole = named_tensors(plain(job))
    assert list(whole) == list(like) and all(torch.equal(whole[name], like[name]) for name in like)
    for rank in range(3):
        made = defer_init(job.model, seed=0, world=World.alone(), limit_bytes=0, pretrained=job.model)  # type: ignore[arg-type]
        parts = {name: shard_rows(ShardSpec.full(t.shape), shard_rank=rank, num_shards=3) for name, t in like.items()}
        values, notes = made.values(parts)
        assert set(values) == set(like) and notes == [] and made.notes == ()
        assert all(torch.equal(values[name], parts[name].extract(like[name].detach())) for name in like)


def test_only_what_lies_in_the_part_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved("llama", tmp_path)
    hollow = record_model(zoo.JOBS["llama"]().model, seed=0).model
    parts = {name: ShardSpec.empty(t.shape) for name, t in named_tensors(hollow).items()}
    shape = hollow.get_parameter("lm_head.weight").shape
    parts["lm_head.weight"] = ShardSpec.from_ranges(shape, dim=0, ranges=[(3, 5), (40, 41)])
    shutil.rmtree(tmp_path / "none", ignore_errors=True)
    values, _ = load_shards(hollow, shard_specs=parts, folder=tmp_path)
    assert list(values) == ["lm_head.weight"] and values["lm_head.weight"].shape == (3, zoo.WIDTH)


def test_what_does_not_fit_is_refused_all_at_once(tmp_path: Path) -> None:
    saved("bert", tmp_path)
    config = config_of("bert")
    config.num_labels, config.intermediate_size = 3, 40
    config.save_pretrained(tmp_path)
    job = job_of("bert", tmp_path, task="text-classification")
    with pytest.raises(CheckpointError) as caught:
        plain(job)
    text = str(caught.value)
    assert "missing: " in text and "unexpected: cls.predictions" in text and "[48, 32]" in text
    assert "new=['bert.pooler.dense', 'classifier']" in text


def test_a_new_head_begins_anew_and_is_the_same_for_every_way(tmp_path: Path) -> None:
    like = saved("vit", tmp_path)
    kept = like.vit
    assert isinstance(kept, nn.Module)
    kept.save_pretrained(tmp_path / "base")  # type: ignore[operator]
    job = job_of("vit", tmp_path / "base", task="image-classification", new=("classifier",))
    config = job.model.build.config  # type: ignore[attr-defined]
    config.num_labels = 10
    whole = plain(job)
    made = defer_init(job.model, seed=0, world=World.alone(), limit_bytes=0, pretrained=job.model)  # type: ignore[arg-type]
    fill_model(made.model, made.values({})[0])
    for name, tensor in named_tensors(whole).items():
        assert torch.equal(tensor, named_tensors(made.model)[name]), name
    assert torch.equal(whole.get_parameter("vit.layernorm.weight"), like.get_parameter("vit.layernorm.weight"))
    assert whole.get_parameter("classifier.weight").std() > 0


def test_another_head_on_the_same_body(tmp_path: Path) -> None:
    like = saved("bert", tmp_path)
    job = job_of("bert", tmp_path, task="text-classification", new=("bert.pooler", "classifier"))
    model = plain(job)
    name = "bert.encoder.layer.1.attention.self.query.weight"
    assert torch.equal(model.get_parameter(name), like.get_parameter(name))


def test_another_type_is_told(tmp_path: Path) -> None:
    like = saved("gpt2", tmp_path).to(torch.bfloat16)
    like.save_pretrained(tmp_path)  # type: ignore[operator]
    (tmp_path / "model.safetensors.index.json").unlink(missing_ok=True)
    job = job_of("gpt2", tmp_path)
    made = defer_init(job.model, seed=0, world=World.alone(), limit_bytes=0, pretrained=job.model)  # type: ignore[arg-type]
    values, notes = made.values({})
    assert all(v.dtype == torch.float32 for v in values.values()) and "bfloat16 to float32" in notes[0]


@pytest.mark.parametrize(
    ("call", "word"),
    [
        (lambda: job_of("llama", task="translation"), "task="),
        (lambda: job_of("llama", task="masked-lm"), "no Llama for masked-lm"),
        (lambda: pl.hf.job(3, train_data=[0], global_batch_size=1), "a config or a folder"),
        (lambda: pl.hf.job("gpt2-that-is-not-here", train_data=[0], global_batch_size=1), "no config.json"),
        (lambda: job_of("bert", train_data=[{"input_ids": [1, 2]}]), "mask token"),
        (lambda: job_of("gpt2", train_data=["some text"]).train_data[0], "no tokenizer"),
    ],
)
def test_refusals_say_what_to_type(call: Any, word: str) -> None:
    with pytest.raises((JobError, CheckpointError), match=word) as caught:
        call()
    assert "to do:" in str(caught.value)


HEARS = {"vocab_size": 64, "num_mel_bins": 8, "d_model": 16, "max_source_positions": 8, "max_target_positions": 8} | {
    f"{side}_{what}": number
    for side in ("encoder", "decoder")
    for what, number in (("layers", 1), ("attention_heads", 2), ("ffn_dim", 16))
}


def test_what_hears_is_trained_to_write(tmp_path: Path) -> None:
    """From a config and from a folder, whose class has the ending of a translator's."""
    config = transformers.WhisperConfig(
        **HEARS, pad_token_id=0, bos_token_id=1, eos_token_id=1, decoder_start_token_id=1
    )
    transformers.WhisperForConditionalGeneration(config).save_pretrained(tmp_path)
    rows = [{"input_features": torch.ones(8, 16), "labels": [2, 3, 4][: 2 + i % 2]} for i in range(4)]
    for source in (config, tmp_path):
        job = pl.hf.job(source, train_data=rows, global_batch_size=2)
        model = job.model()
        assert type(model) is transformers.WhisperForConditionalGeneration and job.collate is not None
        assert model(**job.collate([job.train_data[0], job.train_data[1]])).loss.isfinite()


@pytest.mark.parametrize(
    ("kind", "named", "task", "hint"),
    [
        ("CLIP", ["CLIPModel"], None, "task='image-classification' or task=transformers.CLIPModel"),
        ("Siglip", None, None, "task=transformers.SiglipModel"),
        ("Llava", ["LlavaForConditionalGeneration"], None, "task=transformers.LlavaForConditionalGeneration"),
        ("Whisper", None, "seq2seq-lm", "task='causal-lm' or task='speech-seq2seq'"),
    ],
)
def test_a_config_that_says_no_task_gets_told_what_works(kind: str, named: Any, task: Any, hint: str) -> None:
    config = getattr(transformers, f"{kind}Config")(architectures=named)
    with pytest.raises(JobError) as caught:
        pl.hf.job(config, train_data=[0], global_batch_size=1, task=task)
    assert hint in caught.value.hint


class Letters:
    """A tokenizer of letters."""

    pad_token_id, mask_token_id, all_special_ids = 0, 3, (0, 1, 2, 3)

    def __call__(self, text: str = "", *, text_target: str = "", max_length: int | None = None, **_: Any) -> Any:
        ids = [4 + ord(letter) % 60 for letter in (text or text_target)][:max_length]
        return {"input_ids": ids, "attention_mask": [1] * len(ids)}


def test_text_becomes_padded_batches_with_labels() -> None:
    rows = ["one line", "two", {"text": "a longer line of text"}]
    causal = job_of("gpt2", train_data=rows, tokenizer=Letters(), length=10)
    assert causal.collate is not None
    batch = causal.collate([causal.train_data[i] for i in range(3)])
    assert batch["input_ids"].shape == (3, 10) and batch["attention_mask"].sum().item() == 8 + 3 + 10
    assert torch.equal(batch["labels"] == -100, batch["attention_mask"] == 0)
    hidden = job_of("bert", train_data=rows, tokenizer=Letters(), mask_rate=0.5)
    first, second = hidden.train_data[2], hidden.train_data[2]
    assert not torch.equal(first["labels"], second["labels"]) and (first["labels"] == -100).any()
    pairs = job_of("t5", train_data=[{"text": "abc", "answer": "de"}], tokenizer=Letters(), target="answer")
    assert len(pairs.train_data[0]["labels"]) == 2


def test_without_transformers_the_line_to_type_is_said() -> None:
    code = (
        "import sys; sys.modules['transformers'] = None\n"
        "import paceline as pl\n"
        "hf = pl.hf\n"
        "try:\n    hf.job\nexcept pl.MachineError as error:\n    print(error.hint)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "pip install 'paceline[hf]'" in done.stdout, done.stderr


JOB = """
from tests.hf.test_hf_jobs import job_of
def make_job(family: str = "llama"):
    return job_of(family, settings={"train.steps": 2})
"""


@pytest.mark.parametrize("family", [f if f == "t5" else pytest.param(f, marks=pytest.mark.soak) for f in FAMILIES])
def test_two_ranks_train_as_one_process(shop: Shop, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    root = str(Path(__file__).parents[2])
    monkeypatch.setenv("PYTHONPATH", ":".join([root, *(p for p in sys.path if p)]))
    (shop.path / "hf_job.py").write_text(JOB)
    done = shop.run("verify", "hf_job.py", f"--job.family={family}", "--layout", "ddp", "--ranks", "2", "--json")
    assert done.code == 0, done.text
    assert done.json()["verdict"] in ("bitwise", "rounding")
