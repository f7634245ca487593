"""A sequence sharded over ranks gives the outputs, losses, gradients and weights of the whole; faults show."""

import copy
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.comm.process_group import World
from paceline.comm.rank_threads import run_simulated_ranks, thread_worlds
from paceline.errors import JobError, LayoutError
from paceline.parallel.context_parallel import context_parallel as context
from paceline.parallel.context_parallel import function_mode as context_mode
from paceline.parallel.context_parallel import ring_attention as context_ring
from paceline.parallel.context_parallel import sequence_sharding as context_cut
from paceline.parallel.context_parallel.attention_mask import interpret_mask
from paceline.parallel.context_parallel.context_parallel import ContextParallel
from paceline.parallel.context_parallel.context_parallel_check import check_context
from paceline.parallel.context_parallel.ring_attention import Ring, ring_attention
from paceline.parallel.context_parallel.sequence_sharding import SequenceSharding, next_position_labels, shard_batch
from tests.parallel.one_process_reference import (
    BERT,
    BERT_PLAIN,
    LLAMA,
    MIXTRAL,
    SEQUENCE,
    Case,
    alone,
    assert_context,
    distance_context,
    seeded,
    text,
    train,
    transformer,
)


@pytest.mark.parametrize(("length", "ranks"), [(4, 2), (5, 2), (17, 3), (64, 4), (11, 1), (16, 8)])
def test_every_position_is_on_one_rank_and_comes_back(length: int, ranks: int) -> None:
    cut = SequenceSharding(length=length, ranks=ranks)
    held = torch.cat([cut.positions(rank) for rank in range(ranks)])
    assert sorted(held.tolist()) == list(range(length))
    sizes = [cut.local_length(rank) for rank in range(ranks)]
    assert sum(sizes) == length and max(sizes) - min(sizes) <= 2
    whole = torch.arange(2 * length).view(2, length)
    assert torch.equal(cut.join([cut.shard(whole, dim=1, rank=r) for r in range(ranks)], dim=1), whole)


def test_the_work_of_a_causal_mask_is_shared() -> None:
    cut = SequenceSharding(length=64, ranks=4)
    assert {int((cut.positions(rank) + 1).sum()) for rank in range(4)} == {520}


def test_a_sequence_shorter_than_the_chunks_is_refused_with_the_arithmetic() -> None:
    with pytest.raises(LayoutError, match=r"sequence of 7 over cp=4 needs at least 2 x 4 = 8"):
        SequenceSharding(length=7, ranks=4)


def test_labels_are_moved_before_they_are_cut() -> None:
    ids = torch.arange(2 * 9).view(2, 9)
    parts = [
        shard_batch({"input_ids": ids, "labels": ids}, sequence=SEQUENCE, ranks=2, rank=r, shift_labels=True)
        for r in (0, 1)
    ]
    cut = SequenceSharding(length=9, ranks=2)
    joined = cut.join([part["labels"] for part in parts], dim=1)
    assert torch.equal(joined, torch.cat([ids[:, 1:], torch.full((2, 1), -100)], 1))
    for part in parts:
        real = part["labels"] != -100
        assert torch.equal(part["labels"][real], part["input_ids"][real] + 1)


def test_what_a_batch_may_be_cut_by_is_said_of_its_own_entries() -> None:
    images = (torch.ones(4, 3, 8, 8), torch.ones(4))
    assert context_cut.sequence_hint(images) == "leave cp out: this batch has no sequence"
    assert "sequence={'ids': 1} in" in context_cut.sequence_hint({"ids": torch.ones(4, 8), "label": torch.ones(4)})


def test_what_has_the_tokens_shape_is_cut_and_the_rest_is_not() -> None:
    batch = ({"x": 1}, torch.zeros(2, 8), torch.zeros(2, 8, 3), torch.zeros(2, 5), torch.zeros(8))
    mine = shard_batch(batch, sequence={"1": 1}, ranks=2, rank=0)
    assert [tuple(t.shape) for t in mine[1:]] == [(2, 4), (2, 4, 3), (2, 5), (8,)]
    with pytest.raises(JobError, match="does not match"):
        shard_batch(batch, sequence={"ids": 1}, ranks=2, rank=0)
    with pytest.raises(JobError, match="differ: 1 has 8, 3 has 5"):
        shard_batch(batch, sequence={"1": 1, "3": 1}, ranks=2, rank=0)


# -- the ring


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kind", ["plain", "grouped", "padded", "blocks"])
def test_the_ring_is_attention(causal: bool, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if kind == "blocks":
        monkeypatch.setattr(context_ring, "BLOCK_SIZE", 3)
    assert (
        far_ring(ranks=3, length=19, causal=causal, groups=2 if kind == "grouped" else 1, pad=kind == "padded") < 1e-13
    )


def far_ring(*, ranks: int, length: int, causal: bool, groups: int = 1, pad: bool = False) -> float:
    """Output and gradients of the ring against torch's own attention on the whole."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(2, h, length, d, dtype=torch.float64, generator=generator)
        for h, d in ((4, 8), (4 // groups, 8), (4 // groups, 6))
    )
    weigh = torch.randn(2, 4, length, 6, dtype=torch.float64, generator=generator)
    keep = torch.ones(2, length, dtype=torch.uint8)
    if pad:
        keep[0, :5] = 0  # with a causal mask, the first queries see nothing
        keep[1, 9:] = 0
    seen = keep.bool()[:, None, None, :] & (torch.ones(length, length).tril() > 0 if causal else True)
    whole = [t.clone().requires_grad_() for t in (q, k, v)]
    wanted = F.scaled_dot_product_attention(*whole, attn_mask=seen, enable_gqa=groups > 1)
    (wanted * weigh).sum().backward()
    cut = SequenceSharding(length=length, ranks=ranks)

    def one(over: World) -> list[Tensor]:
        mine = [cut.shard(t, dim=2, rank=over.rank).requires_grad_() for t in (q, k, v)]
        held = cut.shard(keep, dim=1, rank=over.rank) if pad else None
        ring = Ring(world=over, sharding=cut, is_causal=causal, scale=1 / math.sqrt(8))
        out = ring_attention(mine[0].unflatten(1, (-1, groups)), mine[1], mine[2], key_mask=held, ring=ring).flatten(
            1, 2
        )
        (out * cut.shard(weigh, dim=2, rank=over.rank)).sum().backward()
        return [out.detach(), *(t.grad for t in mine)]

    parts = run_simulated_ranks(one, ranks=ranks)
    joined = [cut.join([part[n] for part in parts], dim=2) for n in range(4)]
    right = [wanted.detach(), *(t.grad for t in whole)]
    return max(float((a - b).abs().max()) for a, b in zip(joined, right, strict=True))


def test_the_bytes_sent_are_those_of_the_formula() -> None:
    batch, heads, length, width, ranks = 2, 3, 24, 4, 3
    cut = SequenceSharding(length=length, ranks=ranks)

    def one(over: World) -> int:
        counted = Counted(over)
        q, k, v = (torch.randn(batch, heads, length // ranks, width, requires_grad=True) for _ in range(3))
        ring = Ring(world=counted, sharding=cut, is_causal=True, scale=1.0)
        ring_attention(q[:, :, None], k, v, key_mask=None, ring=ring).sum().backward()
        return counted.elements

    each = 2 * batch * heads * (length // ranks) * width
    assert run_simulated_ranks(one, ranks=ranks) == [(ranks - 1) * each + (ranks - 1) * each + ranks * each] * ranks


class Counted:
    """A world that counts the elements it sends on."""

    def __init__(self, over: World) -> None:
        self.over, self.rank, self.world_size, self.elements = over, over.rank, over.world_size, 0

    def start_ring_shift(self, tensors: Any, *, shapes: Any) -> Any:
        self.elements += sum(tensor.numel() for tensor in tensors)
        return self.over.start_ring_shift(tensors, shapes=shapes)


def test_the_ring_in_bfloat16_is_as_near_as_attention_in_bfloat16() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 48, 8, generator=generator) for _ in range(3))
    right = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    low = [t.bfloat16() for t in (q, k, v)]
    plain = (F.scaled_dot_product_attention(*low, is_causal=True).float() - right).abs().max()
    cut = SequenceSharding(length=48, ranks=3)

    def one(over: World) -> Tensor:
        mine = [cut.shard(t, dim=2, rank=over.rank) for t in low]
        ring = Ring(world=over, sharding=cut, is_causal=True, scale=1 / math.sqrt(8))
        return ring_attention(mine[0][:, :, None], mine[1], mine[2], key_mask=None, ring=ring)[:, :, 0]

    found = cut.join(run_simulated_ranks(one, ranks=3), dim=2)
    assert found.dtype == torch.bfloat16
    assert (found.float() - right).abs().max() < 1.5 * plain


# -- whole models, unmodified


@pytest.mark.parametrize(("length", "ranks"), [(64, 2), (37, 3), (9, 4)])
def test_the_text_example(length: int, ranks: int) -> None:
    assert_context(text(length=length), ranks=ranks)


@pytest.mark.parametrize("padding", ["", "left", "right"])
@pytest.mark.parametrize(
    ("name", "settings"),
    [(LLAMA, {"num_key_value_heads": 2}), (BERT, BERT_PLAIN), (MIXTRAL, {"num_key_value_heads": 2})],
)
def test_models_of_transformers(name: str, settings: dict[str, Any], padding: str) -> None:
    assert_context(transformer(name, padding=padding, **settings), ranks=2)


@pytest.mark.parametrize(
    "name", ["GPT2LMHeadModel/GPT2Config", "Qwen3ForCausalLM/Qwen3Config", "GPTNeoXForCausalLM/GPTNeoXConfig"]
)
def test_more_models_of_transformers_on_three_ranks(name: str) -> None:
    settings = (
        {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0} if "GPT2" in name else {"num_key_value_heads": 4}
    )
    assert_context(transformer(name, bos_token_id=None, eos_token_id=None, **settings), ranks=3)


class Own(nn.Module):
    """A model that counts its positions itself, in one of several ways, and attends in one of several ways."""

    def __init__(self, *, positions: str = "table", attention: str = "sdpa") -> None:
        super().__init__()
        self.positions, self.attention = positions, attention
        self.embed, self.head = nn.Embedding(64, 16), nn.Linear(16, 64)
        self.places = nn.Parameter(torch.randn(1, 40, 16))
        self.qkv, self.many = nn.Linear(16, 48), nn.MultiheadAttention(16, 2, batch_first=True)
        self.near = nn.Conv1d(16, 16, 3, padding="same")
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)

    def forward(self, ids: Tensor) -> Tensor:
        length = ids.shape[1]
        x = self.embed(ids)
        if self.positions == "table":
            x = x + self.places[:, :length]
        elif self.positions == "arange":
            x = x + self.places[0][torch.arange(0, length, dtype=torch.long, device=ids.device)]
        elif self.positions == "sum":
            x = x + (ids > 0).cumsum(1)[..., None]
        elif self.positions == "near":
            x = x + self.near(x.transpose(1, 2)).transpose(1, 2)
        mask = torch.full((length, length), -torch.inf, dtype=x.dtype).triu(1)
        if self.attention == "heads":
            return self.head(x + self.many(x, x, x, attn_mask=mask)[0])
        if self.attention == "layer":
            padding = torch.zeros(ids.shape, dtype=x.dtype).masked_fill(ids < 8, -torch.inf)
            return self.head(self.layer(x, src_mask=mask, src_key_padding_mask=padding, is_causal=True))
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        if self.attention == "matmul":
            seen = ((q @ k.mT) / 8**0.5 + mask).softmax(-1) @ v
        else:
            seen = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.head(x + seen.transpose(1, 2).flatten(2))


def own(**settings: str) -> Case:
    generator = torch.Generator().manual_seed(4)
    return Case(
        model=lambda: seeded(lambda: Own(**settings)),
        batches=[torch.randint(2, 64, (2, 21), generator=generator) for _ in range(2)],
        forward=lambda model, batch: model(batch),
        loss=lambda output, batch: (output.log_softmax(-1)[..., 3].sum(), batch.numel()),
        sequence={"0": 1},
    )


@pytest.mark.parametrize("positions", ["table", "arange", "near", "none"])
def test_a_model_that_counts_its_positions_itself(positions: str) -> None:
    assert_context(own(positions=positions), ranks=2)


@pytest.mark.parametrize("attention", ["heads", "layer"])
def test_multi_head_attention(attention: str) -> None:
    assert_context(own(attention=attention), ranks=3)


def test_a_forward_that_is_run_again_in_backward() -> None:
    from torch.utils.checkpoint import checkpoint

    case = own()
    start = case.model().double()

    def one(over: World) -> list[Tensor]:
        model = copy.deepcopy(start)
        placed = ContextParallel(model=model, sequence=case.sequence, world=over)
        part = placed.shard(case.batches[0])
        with placed.forward(part):
            out = checkpoint(model, part.data, use_reentrant=False, context_fn=placed.recompute_contexts)
        out.log_softmax(-1)[..., 3].sum().backward()
        return [over.all_reduce(p.grad.clone()) for p in model.parameters() if p.grad is not None]

    wanted = run_simulated_ranks(one, ranks=1)[0]
    for found in run_simulated_ranks(one, ranks=2):
        assert len(found) == len(wanted)
        assert all(torch.allclose(a, b, rtol=1e-12, atol=1e-12) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("batch_first", [True, False])
def test_dropout_is_one_process_s(batch_first: bool) -> None:
    """Also where the batch is first in shape but not in memory, as after nn.MultiheadAttention."""
    drop = nn.Dropout(0.4)
    x = torch.randn(3, 11, 5) if batch_first else torch.randn(11, 3, 5).transpose(0, 1)
    torch.manual_seed(7)
    wanted, following = drop(x), torch.rand(1)
    cut, parts = SequenceSharding(length=11, ranks=2), []
    for rank in range(2):  # one after another: threads would share the generator
        part = (
            cut.shard(x.transpose(0, 1), dim=0, rank=rank).transpose(0, 1)
            if not batch_first
            else cut.shard(x, dim=1, rank=rank)
        )
        torch.manual_seed(7)
        with context_mode.ContextParallelMode(world=thread_worlds(replicas=2)[rank], sharding=cut, model=drop):
            parts.append(drop(part))
        assert torch.rand(1) == following
    assert torch.equal(cut.join(parts, dim=1), wanted)


# -- the check, and what is refused


def check(case: Case, *, ranks: int = 2) -> None:
    check_context(
        model=case.model(),
        batch=case.batches[0],
        sequence=case.sequence,
        ranks=ranks,
        forward=case.forward,
        loss=case.loss,
        is_model_loss=case.own_loss,
    )


def test_the_check_passes_what_is_right_and_leaves_the_model() -> None:
    for case in (text(length=13), transformer(LLAMA, num_key_value_heads=2), transformer(BERT), own()):
        check(case, ranks=3)
    model = Own()
    before = {n: p.clone() for n, p in model.state_dict().items()}
    drawn = torch.get_rng_state()
    model.register_forward_hook(lambda *_: model.__dict__.update(seen=torch.rand(1)))
    check_context(
        model=model, batch=torch.ones(1, 9, dtype=torch.int64), sequence={"0": 1}, ranks=2, forward=own().forward
    )
    assert all(torch.equal(before[n], p) for n, p in model.state_dict().items()) and model.training
    assert torch.equal(drawn, torch.get_rng_state()) and "seen" not in vars(model)


@pytest.mark.parametrize("kind", [torch.float32, torch.complex64])
def test_a_loss_that_asks_for_float32_is_compared_in_float64_too(kind: torch.dtype) -> None:
    """Sums in float32 over large logits would differ by more than the check accepts."""

    def loss(output: Tensor, batch: Tensor) -> tuple[Tensor, int]:
        wide = 300 * output.flatten(0, 1).to(kind)
        logits = wide.abs() if kind.is_complex else wide
        return F.cross_entropy(logits, batch.flatten() % logits.shape[-1], reduction="sum"), batch.numel()

    for seed in range(3):
        torch.manual_seed(seed)
        batch = torch.randint(0, 7, (4, 9))
        check_context(model=Own(), batch=batch, sequence={"0": 1}, ranks=2, forward=own().forward, loss=loss)


REFUSED = [
    (lambda: own(attention="matmul"), r"first one that differs comes from (the module head|the model's own)"),
    (lambda: own(positions="sum"), r"first one that differs comes from the module qkv \(Linear\)"),
    (lambda: transformer(LLAMA, attn_implementation="eager"), "uses 'eager' attention"),
    (
        lambda: transformer("MistralForCausalLM/MistralConfig", sliding_window=5, num_key_value_heads=2),
        "sliding_window=5 is shorter than",
    ),
    (lambda: transformer("BloomForCausalLM/BloomConfig", n_head=4), "uses 'eager' attention"),
    (lambda: biased(), r"an attention mask of shape \(1, 2, 11, 11\) is neither causal, nor padding"),
    (
        lambda: transformer("BartForConditionalGeneration/BartConfig", decoder_start_token_id=0),
        "has two sequences, an encoder's and a decoder's",
    ),
    (
        lambda: transformer("RobertaForMaskedLM/RobertaConfig", pad_token_id=1),  # its positions begin at 2
        r"position_embeddings \(Embedding\)",
    ),
    (lambda: recurrent(), r"rnn \(LSTM\) can't be split along the sequence: each position depends"),
    (lambda: pooled(), "no output of this model has a sequence dimension"),
    (lambda: unshifted(), "compares a position with its neighbour"),
    (lambda: mean(), "the loss is one number, a mean over its samples"),
]


@pytest.mark.parametrize(("case", "message"), REFUSED, ids=range(len(REFUSED)))
def test_what_can_not_be_cut_is_refused_by_name(case: Any, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        check(case())


def test_positions_in_the_batch_are_cut_with_it() -> None:
    case = transformer("RobertaForMaskedLM/RobertaConfig", pad_token_id=1)
    ids = case.batches[0]["input_ids"].clamp(min=2)
    places = torch.arange(2, ids.shape[1] + 2).expand_as(ids).contiguous()
    check(Case(**{**vars(case), "batches": [{"input_ids": ids, "position_ids": places, "labels": ids}]}), ranks=3)
    with pytest.raises(JobError, match="does not say which dimension"):
        check(Case(**{**vars(case), "sequence": {}}))


def test_attention_dropout_over_a_long_sequence_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context_mode, "MAX_RANDOM_NUMBERS", 1000)
    case = transformer(LLAMA, attention_dropout=0.1)
    with pytest.raises(LayoutError, match=r"attention dropout of 0.1 needs 3,528 random numbers on every rank"):
        run_simulated_ranks(lambda over: train(case, over), ranks=2)


def biased() -> Case:
    class Model(Own):
        def forward(self, ids: Tensor) -> Tensor:
            x = self.embed(ids)
            q, k, v = self.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
            far = torch.arange(ids.shape[1]).view(-1, 1) - torch.arange(ids.shape[1])
            bias = -far.abs() * torch.tensor([0.5, 0.25]).view(1, 2, 1, 1).to(x.dtype)
            return self.head(F.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2).flatten(2))

    return Case(**{**vars(own()), "model": Model})


def recurrent() -> Case:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.rnn = nn.Embedding(64, 8), nn.LSTM(8, 8, batch_first=True)

        def forward(self, ids: Tensor) -> Tensor:
            return self.rnn(self.embed(ids))[0]

    return Case(**{**vars(own()), "model": Model})


def pooled() -> Case:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(64, 8)

        def forward(self, ids: Tensor) -> Tensor:
            return self.embed(ids).sum(1)

    return Case(**{**vars(own()), "model": Model, "loss": lambda output, batch: (output.detach().sum(), 1)})


def unshifted() -> Case:
    def loss(output: Tensor, batch: Tensor) -> tuple[Tensor, int]:
        return F.cross_entropy(output[:, :-1].flatten(0, 1), batch[:, 1:].flatten(), reduction="sum"), batch[
            :, 1:
        ].numel()

    return Case(**{**vars(own()), "loss": loss})


def mean() -> Case:
    return Case(**{**vars(own()), "loss": lambda output, batch: output.log_softmax(-1)[..., 3].mean()})


def test_masks_that_mean_more_are_refused() -> None:
    window = torch.ones(6, 6).tril().triu(-2) > 0
    with pytest.raises(LayoutError, match="neither causal, nor padding"):
        interpret_mask(window, is_causal=False, batch=1, length=6)
    with pytest.raises(LayoutError, match="neither causal, nor padding"):
        interpret_mask(torch.randn(1, 2, 6, 6), is_causal=False, batch=1, length=6)
    packed = torch.block_diag(torch.ones(3, 3), torch.ones(3, 3)).tril() > 0
    with pytest.raises(LayoutError, match="neither causal, nor padding"):
        interpret_mask(packed, is_causal=False, batch=1, length=6)
    found = interpret_mask(torch.ones(6, 6).tril() > 0, is_causal=False, batch=1, length=6)
    assert found.is_causal and found.key_mask is None


# -- mistakes that must show


def _positions_of_the_part(self: SequenceSharding, rank: int, *, device: Any = None) -> Tensor:
    return torch.arange(self.local_length(rank), device=device)


def _one_off(self: SequenceSharding, rank: int, *, device: Any = None) -> Tensor:
    first, second = self.chunks(rank)
    return torch.cat([torch.arange(first.start, first.stop), torch.arange(second.start - 1, second.stop - 1)])


def _other_way(self: Ring, round_index: int) -> int:
    return (self.world.rank + round_index) % self.world.world_size


def _unmerged(
    out: Tensor, lse: Tensor, query: Tensor, held: Any, drop: Any, rows: Any, columns: Any, ring: Ring
) -> None:
    scores = context_ring._scores(query, held, rows, columns, ring, out.dtype)
    there, values = rows.local_slice, held[1][..., columns.local_slice, :]
    out[..., there, :] += (scores.softmax(-1).nan_to_num() @ values).view(out[..., there, :].shape)
    lse[..., there] = torch.logaddexp(lse[..., there], scores.logsumexp(-1).view(lse[..., there].shape))


def _cut_then_moved(batch: Any, **given: Any) -> Any:
    mine = shard_batch(batch, **{**given, "shift_labels": False})
    if given["shift_labels"]:
        mine["labels"] = next_position_labels(mine["labels"], dim=1)
    return mine


def _no_mask(*args: Any, **kwargs: Any) -> Any:
    found = interpret_mask(*args, **kwargs)
    return type(found)(is_causal=found.is_causal, key_mask=None)


FAULTS = {
    "positions of the part": (SequenceSharding, "positions", _positions_of_the_part),
    "the back chunk one off": (SequenceSharding, "positions", _one_off),
    "the ring taken for the other way round": (Ring, "key_owner", _other_way),
    "partial results not merged": (context_ring, "_merge_block", _unmerged),
    "labels moved after the cut": (context, "shard_batch", _cut_then_moved),
    "padding of other parts seen": (context_mode, "interpret_mask", _no_mask),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_mistake_shows(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = transformer(LLAMA, num_key_value_heads=2, padding="right", lengths=(21,))
    if fault == "padding of other parts seen":  # those after the last label are seen by nobody in a causal model
        case = transformer(BERT, padding="right", lengths=(21,), **BERT_PLAIN)
    assert_context(case, ranks=3)
    monkeypatch.setattr(*FAULTS[fault])
    assert 1e-4 < distance_context(case, ranks=3) < 1e3


def test_keys_whose_gradients_do_not_come_home_show(monkeypatch: pytest.MonkeyPatch) -> None:
    assert far_ring(ranks=3, length=12, causal=True) < 1e-13
    honest = context_ring._start_ring_shift
    monkeypatch.setattr(
        context_ring,
        "_start_ring_shift",
        lambda ring, held, turn: honest(ring, held, turn) if turn < 2 else lambda: held,
    )
    assert far_ring(ranks=3, length=12, causal=True) > 1e-3


def test_one_rank_is_the_model_itself() -> None:
    case = text(length=9)
    assert torch.equal(torch.tensor(train(case, alone()).losses), torch.tensor(train(case, alone()).losses))
    assert context_cut.SequenceSharding(length=1, ranks=1).local_length(0) == 1
