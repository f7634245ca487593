"""Without `loss=`, a Hugging Face head gives the loss of the whole batch, whatever it does with its item count."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import paceline as pl
from paceline.errors import JobError
from paceline.step.loss.loss_return_value import LossContract
from paceline.verification.reference.forward import ReferenceForward

transformers = pytest.importorskip("transformers")

SMALL = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 50}


def ids(*shape: int, most: int = 50) -> Tensor:
    return torch.randint(1, most, shape, generator=torch.Generator().manual_seed(1))


def words(labels: Tensor) -> dict[str, Tensor]:
    return {"input_ids": ids(7, 9), "attention_mask": torch.ones(7, 9, dtype=torch.long), "labels": labels}


def masked(labels: Tensor) -> Tensor:
    """Unevenly: some rows have one target, some eight."""
    row = torch.arange(7)[:, None]
    return torch.where(torch.arange(9)[None] > row, labels, torch.full_like(labels, -100))


def over_classes(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]).float(), labels.reshape(-1))


def next_word(logits: Tensor, labels: Tensor) -> Tensor:
    return over_classes(logits[:, :-1], labels[:, 1:])


def squares(logits: Tensor, labels: Tensor) -> Tensor:
    return F.mse_loss(logits.squeeze(-1), labels)


Case = tuple[Callable[[], nn.Module], dict[str, Tensor], Callable[[Tensor, Tensor], Tensor]]


def cases() -> dict[str, Case]:
    t, bert, llama = transformers, transformers.BertConfig(**SMALL), transformers.LlamaConfig(**SMALL, pad_token_id=0)
    regression = transformers.BertConfig(**SMALL, num_labels=1, problem_type="regression")
    t5 = t.T5Config(vocab_size=50, d_model=32, d_kv=16, d_ff=32, num_layers=1, num_heads=2, decoder_start_token_id=0)
    vit = t.ViTConfig(**{k: v for k, v in SMALL.items() if k != "vocab_size"}, image_size=8, patch_size=4, num_labels=5)
    images = torch.randn(7, 3, 8, 8, generator=torch.Generator().manual_seed(2))
    some = masked(ids(7, 9))
    return {
        "sentences": (lambda: t.BertForSequenceClassification(bert), words(ids(7, most=2)), over_classes),
        "regression": (lambda: t.BertForSequenceClassification(regression), words(torch.rand(7)), squares),
        "tokens": (lambda: t.BertForTokenClassification(bert), words(masked(ids(7, 9, most=2))), over_classes),
        "masked words": (lambda: t.BertForMaskedLM(bert), words(some), over_classes),
        "sentences, causal": (lambda: t.LlamaForSequenceClassification(llama), words(ids(7, most=2)), over_classes),
        "next word": (lambda: t.LlamaForCausalLM(llama), words(some), next_word),
        "translation": (lambda: t.T5ForConditionalGeneration(t5), words(some), over_classes),
        "images": (lambda: t.ViTForImageClassification(vit), {"pixel_values": images, "labels": ids(7, most=5)}, over_classes),
    }  # fmt: skip


def job(make: Callable[[], nn.Module]) -> pl.Job:
    return pl.Job(
        model=make, train_data=[0], optimizer=lambda named: torch.optim.SGD([p for _, p in named]), global_batch_size=7
    )


def cut(batch: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    return [{k: v[i:j] for k, v in batch.items()} for i, j in ((0, 1), (1, 4), (4, 7))]


def by_us(made: pl.Job, model: nn.Module, parts: list[dict[str, Tensor]]) -> Tensor:
    contract = LossContract(job=made, model=model)
    found = [
        contract.terms(contract.forward(model, p), p, num_samples=len(next(iter(p.values()))))["loss"] for p in parts
    ]
    return torch.stack([s for s, _ in found]).sum() / sum(float(n) for _, n in found)


def by_the_oracle(made: pl.Job, model: nn.Module, parts: list[dict[str, Tensor]]) -> Tensor:
    oracle = ReferenceForward(made, model)
    found = [oracle.model_loss(oracle.compute_output(p), p, len(next(iter(p.values())))) for p in parts]
    return torch.stack([s for s, _ in found]).sum() / sum(float(n) for _, n in found)


@pytest.mark.parametrize("compute", [by_us, by_the_oracle])
@pytest.mark.parametrize("name", cases())
def test_the_parts_of_a_batch_have_the_loss_of_the_batch(name: str, compute: Any) -> None:
    make, batch, right = cases()[name]
    torch.manual_seed(0)
    model = make().eval()
    expected = right(
        model(**{k: v for k, v in batch.items() if k != "labels"}, **extra(name, batch)).logits, batch["labels"]
    )
    loss = compute(job(make), model, cut(batch))
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    model.zero_grad()
    expected.backward()
    wanted = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    loss.backward()
    for n, parameter in model.named_parameters():
        if n in wanted:
            torch.testing.assert_close(parameter.grad, wanted[n], rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("compute", [by_us, by_the_oracle])
def test_rows_without_labels_give_no_loss_and_are_named(compute: Any) -> None:
    make, batch, _ = cases()["sentences"]
    rows = {name: value for name, value in batch.items() if name != "labels"}
    with pytest.raises(JobError, match=r"no \.loss") as caught:
        compute(job(make), make(), [rows])
    assert "the rows have no `labels` (they have input_ids, attention_mask)" in str(caught.value)


def extra(name: str, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    if name != "translation":
        return {}
    start = torch.zeros(7, 1, dtype=torch.long)
    return {"decoder_input_ids": torch.cat([start, batch["labels"][:, :-1].clamp(min=0)], 1)}


@pytest.mark.parametrize("compute", [by_us, by_the_oracle])
def test_a_part_of_the_loss_that_is_not_divided_stays_as_it_is(compute: Any) -> None:
    """Mixtral adds the routers' loss to what it has divided by the number of tokens."""
    config = transformers.MixtralConfig(
        **SMALL, num_key_value_heads=2, num_local_experts=4, output_router_logits=True, router_aux_loss_coef=0.5
    )
    torch.manual_seed(0)
    model = transformers.MixtralForCausalLM(config)
    batch = words(ids(7, 9))
    torch.testing.assert_close(compute(job(lambda: model), model, [batch]), model(**batch).loss, rtol=1e-6, atol=0)


@pytest.mark.parametrize("compute", [by_us, by_the_oracle])
def test_a_part_without_a_target_adds_nothing(compute: Any) -> None:
    make, batch, right = cases()["masked words"]
    model = make().eval()
    labels = batch["labels"].clone()
    labels[:1] = -100
    loss = compute(job(make), model, cut({**batch, "labels": labels}))
    loss.backward()
    assert all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None)
    torch.testing.assert_close(loss, right(model(batch["input_ids"], batch["attention_mask"]).logits, labels))


def test_asking_leaves_the_model_and_the_generators_as_they_were() -> None:
    make, batch, _ = cases()["next word"]
    model = make().train()
    model.model.norm.eval()
    modes, before = [m.training for m in model.modules()], torch.get_rng_state()
    LossContract(job=job(make), model=model).forward(model, batch)
    assert [m.training for m in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), before)
