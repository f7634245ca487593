"""Small unmodified models for the tensor-parallel tests, trained whole and sharded."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from paceline.comm.rank_threads import run_simulated_ranks
from paceline.parallel.module_access.shard_spec import ShardSpec
from paceline.parallel.tensor_parallel.auto_plan import derive_plan
from paceline.parallel.tensor_parallel.collectives import WorldGroup
from paceline.parallel.tensor_parallel.sharded_tensor import ShardPropagatingTensor
from paceline.parallel.tensor_parallel.tensor_parallel import split_model_in_group
from paceline.parallel.tensor_parallel.tensor_plan import TensorPlan

Run = Callable[[nn.Module], Any]
WIDTH, VOCABULARY, LENGTH, STEPS = 32, 53, 8, 3  # 53 divides by nothing
FAR, NEAR = 1e-12, 2e-6  # of a tensor's largest element: float64, and units in the last place of float32


class Double(TorchFunctionMode):
    """Float64 where a model's own code asks for float32, so that only the order of sums is left to differ."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") == "float" and args and isinstance(args[0], Tensor):
            return args[0].double()
        wide = [torch.float64 if a is torch.float32 else a for a in args]
        return func(*wide, **{k: torch.float64 if a is torch.float32 else a for k, a in (kwargs or {}).items()})


@dataclass
class Trained:
    """What came out: the loss and output of the first step, its gradients, the weights at the end."""

    loss: float
    output: Tensor | None
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]
    parts: dict[str, ShardSpec] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def train(model: nn.Module, run: Run, *, steps: int = STEPS) -> Trained:
    """Three steps of AdamW; its eps is large enough that a gradient of rounding alone (a key's bias) stays small."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    first: Trained | None = None
    for _ in range(steps):
        optimizer.zero_grad()
        output = run(model)
        output.loss.backward()
        if first is None:
            logits = output.logits
            logits = logits.full_tensor() if isinstance(logits, ShardPropagatingTensor) else logits
            grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
            first = Trained(float(output.loss.detach()), logits.detach(), grads, {})
        optimizer.step()
    assert first is not None
    first.weights = {n: p.detach().clone() for n, p in model.named_parameters()}
    return first


def in_double(run: Run) -> Run:
    def wrapped(model: nn.Module) -> Any:
        with Double():
            return run(model)

    return wrapped


def run_group(work: Callable[[Any], Any], *, ranks: int, sequence: bool = False) -> list[Any]:
    """`work` on every rank of a tensor-parallel group, each a thread."""
    return run_simulated_ranks(lambda world: work(WorldGroup(world, sequence=sequence)), ranks=ranks)


def train_split(model: nn.Module, run: Run, plan: TensorPlan, *, ranks: int, sequence: bool = False) -> list[Trained]:
    """All ranks as threads."""

    def work(wire: Any) -> Trained:
        mine = copy.deepcopy(model)
        placed = split_model_in_group(mine, plan=plan, group=wire)
        found = train(mine, run)
        found.parts, found.notes = placed.shard_specs, placed.notes
        return found

    return run_group(work, ranks=ranks, sequence=sequence)


def assembled(found: list[Trained], kind: str, shapes: dict[str, Tensor]) -> dict[str, Tensor]:
    """Whole tensors of all ranks' parts; every element must be somebody's."""
    whole = {}
    for name, like in shapes.items():
        whole[name] = torch.full_like(like, float("nan"))
        for rank in found:
            rank.parts[name].write_into(getattr(rank, kind)[name], full_tensor=whole[name])
    return whole


def differences(alone: Trained, found: list[Trained]) -> dict[str, float]:
    """The largest difference of each tensor, in units of its largest element; of replicated ones on every rank."""
    apart = {"loss": max(abs(r.loss - alone.loss) / abs(alone.loss) for r in found)}
    assert alone.output is not None
    apart["output"] = max(relative(r.output, alone.output) for r in found if r.output is not None)
    assert all(list(rank.weights) == list(alone.weights) for rank in found), "other parameters than in one process"
    for kind in ("gradients", "weights"):
        expected = getattr(alone, kind)
        for name, tensor in assembled(found, kind, expected).items():
            apart[f"{kind} {name}"] = relative(tensor, expected[name])
            for rank in found:
                if rank.parts[name].is_full:
                    apart[f"{kind} {name}"] = max(
                        apart[f"{kind} {name}"], relative(getattr(rank, kind)[name], expected[name])
                    )
    return apart


def relative(mine: Tensor | None, whole: Tensor) -> float:
    assert mine is not None
    apart = (mine - whole).abs().max() / whole.abs().max().clamp(min=1e-30)
    return float("inf") if torch.isnan(apart) else float(apart)


def check(make: Callable[[], nn.Module], run: Run, *, ranks: int = 2, sequence: bool = False, **more: Any) -> list[str]:
    """In float64: outputs, gradients and weights after three steps equal one process's; returns the notes."""
    model = make().double()
    plan = more.get("plan") or derive_plan(model, run=run, ranks=ranks)
    run = in_double(run)
    alone = train(copy.deepcopy(model), run)
    found = train_split(model, run, plan, ranks=ranks, sequence=sequence)
    worst = {name: value for name, value in differences(alone, found).items() if not value < FAR}
    zero = {n for n, g in alone.gradients.items() if g.abs().max() < 1e-12}
    bad = {name: value for name, value in worst.items() if name.split(" ")[-1] not in zero}
    assert not bad, bad
    return found[0].notes


# -- models


def ids() -> Tensor:
    return torch.randint(0, VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(3))


def text_labels() -> Tensor:
    labels = ids()
    labels[0, :3] = -100
    return labels


def text_run(model: nn.Module) -> Any:
    return model(input_ids=ids(), labels=text_labels())


def image_run(model: nn.Module) -> Any:
    x = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    return model(pixel_values=x.to(next(model.parameters()).dtype), labels=torch.tensor([1, 7]))


def hugging_face(kind: str, **more: Any) -> nn.Module:
    import transformers as hf

    hf.logging.set_verbosity_error()
    common = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    usual = {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 44}
    torch.manual_seed(1)
    if kind == "llama":
        return hf.LlamaForCausalLM(hf.LlamaConfig(**{**common, **usual, "num_key_value_heads": 2, **more}))
    if kind == "mixtral":
        experts: dict[str, Any] = {"num_key_value_heads": 2, "num_local_experts": 4, "intermediate_size": 48}
        experts["experts_implementation"] = "eager"  # the grouped products know no float64
        return hf.MixtralForCausalLM(hf.MixtralConfig(**{**common, **usual, **experts, **more}))
    if kind == "gpt2":
        sizes = {"n_embd": WIDTH, "n_layer": 2, "n_head": 4, "n_positions": 16}
        quiet = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        return hf.GPT2LMHeadModel(hf.GPT2Config(**{**common, **sizes, **quiet, **more}))
    if kind == "bert":
        quiet = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "max_position_embeddings": 16}
        return hf.BertForMaskedLM(hf.BertConfig(**{**common, **usual, **quiet, **more}))
    if kind == "t5":
        sizes = {"d_model": WIDTH, "d_kv": 8, "d_ff": 44, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
        return hf.T5ForConditionalGeneration(hf.T5Config(**{**common, **sizes, "decoder_start_token_id": 0, **more}))
    assert kind == "vit"
    sizes = {"image_size": 16, "patch_size": 4, "num_labels": 10}
    return hf.ViTForImageClassification(hf.ViTConfig(**{**usual, **sizes, **more}))


class Answer:
    """An output as Hugging Face's, for models that give logits alone."""

    def __init__(self, loss: Tensor, logits: Tensor) -> None:
        self.loss, self.logits = loss, logits


class Mlp(nn.Module):
    """Two pairs of layers, biased, and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layers = nn.Sequential(
            nn.Linear(6, 22), nn.Tanh(), nn.Linear(22, 12), nn.LayerNorm(12), nn.Linear(12, 30), nn.GELU()
        )
        self.out = nn.Linear(30, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.layers(x))


def mlp_run(model: nn.Module) -> Any:
    x = torch.randn(7, 6, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    out = model(x.to(next(model.parameters()).dtype))
    return Answer((out * torch.linspace(0.1, 1.0, out.shape[-1], dtype=out.dtype)).sin().mean(), out)


def gpt() -> nn.Module:
    from paceline.examples.text import GPT

    torch.manual_seed(2)
    return GPT(WIDTH, 2, 4, 16, 0.0)


def gpt_run(model: nn.Module) -> Any:
    import torch.nn.functional as F

    logits = model(ids())
    return Answer(F.cross_entropy(logits.flatten(0, 1), ids().roll(1).flatten(), reduction="sum") / 7, logits)
