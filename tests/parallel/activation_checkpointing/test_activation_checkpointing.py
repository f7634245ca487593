"""Recomputed blocks give the same bits: outputs, gradients, statistics and random streams."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.comm.process_group import World
from paceline.config.activation_checkpointing import parse_remat
from paceline.errors import JobError, LayoutError
from paceline.examples.digits_cnn import ConvNet
from paceline.examples.text import GPT
from paceline.parallel.activation_checkpointing.checkpointing import apply_remat, repeated_blocks
from paceline.parallel.batchnorm.running_statistics import StatisticsRecorder
from paceline.parallel.module_access.blocks import find_blocks
from paceline.torch_internals.rng import RandomStreams

POLICIES = ["full", "every:2", "selective", "selective:addmm+mm"]
transformers = pytest.importorskip("transformers")


class Residual(nn.Module):
    """BatchNorm and dropout in a block, and a number that its forward counts in a buffer."""

    def __init__(self, width: int, counts: bool) -> None:
        super().__init__()
        self.counts = counts
        self.conv, self.norm, self.drop = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.Dropout(0.3)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.counts:
            self.scale.mul_(0.9)  # type: ignore[operator]
        return x + self.drop(torch.relu(self.norm(self.conv(x)))) * self.scale


class Images(nn.Module):
    def __init__(self, *, counts: bool = True) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 8, 3, padding=1)
        self.blocks = nn.ModuleList(Residual(8, counts) for _ in range(4))
        self.head = nn.Linear(8, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.first(images)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


SMALL: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4}
HEADS: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2}


def hf(kind: str) -> nn.Module:
    t = transformers
    if kind == "llama":
        return t.LlamaForCausalLM(t.LlamaConfig(**SMALL, **HEADS, attention_dropout=0.1))
    if kind == "gpt2":
        return t.GPT2LMHeadModel(t.GPT2Config(vocab_size=64, n_embd=32, n_layer=4, n_head=4, n_positions=32))
    if kind == "mixtral":
        return t.MixtralForCausalLM(
            t.MixtralConfig(**SMALL, **HEADS, num_local_experts=4, output_router_logits=True, sliding_window=None)
        )
    return t.T5ForConditionalGeneration(
        t.T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=3, num_heads=4, decoder_start_token_id=0)
    )


def text_loss(model: nn.Module, number: int) -> Tensor:
    ids = torch.randint(0, 64, (3, 17), generator=torch.Generator().manual_seed(number))
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def image_loss(model: nn.Module, number: int) -> Tensor:
    generator = torch.Generator().manual_seed(number)
    images = torch.randn(4, 1, 8, 8, generator=generator)
    return F.cross_entropy(model(images), torch.randint(0, 10, (4,), generator=generator))


def hf_loss(model: nn.Module, number: int) -> Tensor:
    ids = torch.randint(1, 64, (2, 12), generator=torch.Generator().manual_seed(number))
    mask = torch.ones_like(ids)
    mask[0, 9:] = 0
    return model(input_ids=ids, attention_mask=mask, labels=ids).loss  # type: ignore[no-any-return]


Loss = Callable[[nn.Module, int], Tensor]
CASES: dict[str, tuple[Callable[[], nn.Module], Loss]] = {
    "text": (lambda: GPT(width=32, depth=4, heads=2, context=16, dropout=0.2), text_loss),
    "images": (Images, image_loss),
    "norms": (lambda: Images(counts=False), image_loss),
    **{kind: ((lambda kind=kind: hf(kind)), hf_loss) for kind in ("llama", "gpt2", "t5", "mixtral")},
}


def step(case: str, place: Callable[[nn.Module], object], *, autocast: bool = False) -> dict[str, Tensor]:
    """Two steps of two microbatches; everything that one of them may have changed."""
    build, loss = CASES[case]
    torch.manual_seed(3)
    model = build().train()
    streams = RandomStreams(seed=5)
    streams.attach(model)
    tape = StatisticsRecorder(model=model, world=World.alone())
    keys = list(model.state_dict())
    place(model)
    assert list(model.state_dict()) == keys
    found: dict[str, Tensor] = {}
    for number in range(2):
        tape.begin_step()
        for microbatch in range(2):
            tape.set_microbatch(microbatch)
            streams.enter(step=number, microbatch=microbatch)
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                value = loss(model, 10 * number + microbatch)
            value.backward()
            found[f"loss {number} {microbatch}"] = value.detach()
            found[f"generator {number} {microbatch}"] = torch.get_rng_state()
        tape.fold(num_micro=2)
    found |= {f"grad {name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    return found | {f"state {name}": value.clone() for name, value in model.state_dict().items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("case", CASES)
def test_the_same_bits(case: str, policy: str) -> None:
    right = step(case, lambda model: None)
    assert same(right, step(case, lambda model: apply_remat(model, policy=parse_remat(policy)))) == []


@pytest.mark.parametrize("case", ["text", "images", "llama"])
def test_the_same_bits_under_autocast(case: str) -> None:
    right = step(case, lambda model: None, autocast=True)
    assert same(right, step(case, lambda model: apply_remat(model, policy=parse_remat("full")), autocast=True)) == []


def interleaved(case: str, policy: str) -> list[Tensor]:
    """Two forwards, then their backwards, each twice over the same graph, as a schedule may have them."""
    build, loss = CASES[case]
    torch.manual_seed(3)
    model = build().train()
    streams = RandomStreams(seed=5)
    streams.attach(model)
    apply_remat(model, policy=parse_remat(policy))
    losses = []
    for microbatch in range(2):
        streams.enter(step=0, microbatch=microbatch)
        losses.append(loss(model, microbatch))
    for value in losses:
        value.backward(retain_graph=True)
        value.backward()
    return [p.grad for p in model.parameters() if p.grad is not None] + [b.clone() for b in model.buffers()]


@pytest.mark.parametrize("case", ["text", "norms", "gpt2"])
def test_forwards_may_lie_between_a_forward_and_its_backward(case: str) -> None:
    right = interleaved(case, "none")
    assert all(torch.equal(a, b) for a, b in zip(right, interleaved(case, "full"), strict=True))


def test_the_digits_example_by_named_modules() -> None:
    CASES["digits"] = (lambda: ConvNet(8, 0.3), image_loss)
    try:
        right = step("digits", lambda model: None)
        given = lambda m: apply_remat(m, policy=parse_remat("full"), blocks=find_blocks(m, listed_names=["features"]))  # noqa: E731
        assert same(right, step("digits", given)) == []
    finally:
        del CASES["digits"]


class Held:
    """Bytes that autograd holds for backward and that are no parameter's."""

    def __init__(self, model: nn.Module) -> None:
        self.own = {p.untyped_storage().data_ptr() for p in model.parameters()}
        self.seen: dict[int, int] = {}

    def pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self.own:
            self.seen[storage.data_ptr()] = storage.nbytes()
        return tensor


def saved_bytes(policy: str) -> int:
    torch.manual_seed(3)
    model = GPT(width=32, depth=4, heads=2, context=16, dropout=0.0)
    apply_remat(model, policy=parse_remat(policy))
    held = Held(model)
    with torch.autograd.graph.saved_tensors_hooks(held.pack, lambda tensor: tensor):
        loss = text_loss(model, 1)
    del loss
    return sum(held.seen.values())


def test_less_is_kept() -> None:
    none, every, full = saved_bytes("none"), saved_bytes("every:2"), saved_bytes("full")
    assert full < every < none
    assert abs((none + full) / 2 - every) < 0.1 * none  # half of the four equal blocks
    assert full < none / 3


def test_undo_leaves_the_instance_as_it_was() -> None:
    model = GPT(width=32, depth=4, heads=2, context=16, dropout=0.0)
    undo = apply_remat(model, policy=parse_remat("every:3"))
    assert [i for i, block in enumerate(model.blocks) if "forward" in vars(block)] == [0, 3]
    undo()
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_copy_runs_its_own_weights() -> None:
    model = GPT(width=32, depth=2, heads=2, context=16, dropout=0.0)
    apply_remat(model, policy=parse_remat("full"))
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    text_loss(twin, 1).backward()
    assert all(p.grad is None for p in model.parameters())
    assert all(p.grad is not None for p in twin.parameters())


def test_one_model_is_not_treated_twice() -> None:
    model = hf("llama")
    model.model.gradient_checkpointing = True  # type: ignore[union-attr]
    with pytest.raises(LayoutError, match="already"):
        apply_remat(model, policy=parse_remat("full"))
    other = GPT(width=32, depth=2, heads=2, context=16, dropout=0.0)
    apply_remat(other, policy=parse_remat("full"))
    with pytest.raises(LayoutError, match=r"blocks\.0 already checkpoints"):
        apply_remat(other, policy=parse_remat("selective"))


def test_what_cannot_be_run_again_is_refused() -> None:
    with pytest.raises(LayoutError, match="no repeated block"):
        apply_remat(ConvNet(8, 0.0), policy=parse_remat("full"))
    norm = ConvNet(8, 0.0)
    with pytest.raises(LayoutError, match="a single normalisation layer"):
        apply_remat(norm, policy=parse_remat("full"), blocks=find_blocks(norm, listed_names=["features.1"]))
    with pytest.raises(LayoutError, match="no operation 'matmull'"):
        apply_remat(Images(), policy=parse_remat("selective:matmull"))


def test_in_place_over_a_kept_result_is_said() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.act = nn.Linear(8, 8), nn.ReLU(inplace=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.act(self.linear(x))

    model = nn.Sequential(Block(), Block())
    apply_remat(model, policy=parse_remat("selective"))
    with pytest.raises(JobError, match="overwrites a result"):
        model(torch.randn(2, 8)).sum().backward()


def test_a_cache_with_content_is_refused() -> None:
    model = hf("llama").train()
    cache = transformers.DynamicCache(config=model.config)  # type: ignore[arg-type]
    with torch.no_grad():
        model(input_ids=torch.ones(1, 3, dtype=torch.long), past_key_values=cache)
    apply_remat(model, policy=parse_remat("full"))
    with pytest.raises(JobError, match="not empty"):
        model(input_ids=torch.ones(1, 3, dtype=torch.long), past_key_values=cache)


def test_blocks_are_found_by_structure() -> None:
    assert [block.name for block in repeated_blocks(hf("gpt2"))] == [f"transformer.h.{n}" for n in range(4)]
    assert [block.name for block in repeated_blocks(hf("t5"))] == [
        f"{s}.block.{n}" for s in ("encoder", "decoder") for n in range(3)
    ]
