"""Faults of tensor, context and expert parallelism, written by an author who had not read the diagnosis."""

from tests.verification.diagnosis.fault_in_layout import Misplaced

IN_TENSORS = [
    Misplaced(
        name="a row-parallel bias on every rank",
        layout="tp",
        should="Each tp rank adds blocks.0.proj's bias before the sum: it is counted 2 times, the tensor degree.",
        says=("bias", r"2 times.*\btp\b", "forward|output|loss"),
        code="""
from paceline.parallel.tensor_parallel import plan_dry_run
plan_dry_run._describe_difference = lambda *_: ""  # the trial of the plan would find it before verify does
from dataclasses import replace

from paceline.parallel.tensor_parallel.rules import matmul as products
from paceline.parallel.tensor_parallel.sharded_tensor import RULES
_plain = RULES["linear"]

def linear(call):
    weight, bias = call["weight"], call["bias"]
    if isinstance(weight, products.ShardPropagatingTensor) and weight.sharding.dim == 1 and bias is not None:
        found = _plain(replace(call, arguments=call.arguments | {"bias": None}))
        return found + bias * weight.group.size
    return _plain(call)

RULES["linear"] = linear
""",
    ),
    Misplaced(
        name="the gradient of a row-parallel bias summed over tp",
        layout="tp",
        should="Gradients of proj.bias and down.bias are 2 times the right ones: they are whole, and summed over tp.",
        parameters=("blocks.",),
        says=("factor of 2|2 times|times 2", r"\btp\b|tensor", "bias"),
        code="""
from dataclasses import replace

from paceline.parallel.tensor_parallel.rules import matmul as products
from paceline.parallel.tensor_parallel.sharded_tensor import RULES
from paceline.parallel.tensor_parallel.collectives import _CopyToParallelRegion

_plain = RULES["linear"]

def linear(call):
    weight, bias = call["weight"], call["bias"]
    if isinstance(weight, products.ShardPropagatingTensor) and weight.sharding.dim == 1 and bias is not None:
        return _plain(replace(call, arguments=call.arguments | {"bias": None})) + _CopyToParallelRegion.apply(bias, weight.group)
    return _plain(call)

RULES["linear"] = linear
""",
    ),
    Misplaced(
        name="a norm's gradient not reduced over sequence shards",
        layout="tp,sequence=true",
        should="Norm weights' gradients on each tp rank are of its part of the sequence only: not summed over tp.",
        parameters=("blocks.", "norm"),
        says=("norm", "not summed|not added|not reduced|a part|own part", r"\btp\b"),
        quick=True,
        code="""
from paceline.parallel.tensor_parallel.rules import elementwise as rules_math
rules_math.copy_to_parallel_region = lambda whole, wire: whole
""",
    ),
    Misplaced(
        name="gradients of what cut layers read not summed",
        layout="tp",
        should="What column-parallel layers send back is each rank's part only: everything before them is wrong.",
        says=(r"\btp\b", "not summed|not added|not reduced|a part|own part|differ"),
        code="""
from paceline.parallel.tensor_parallel import collectives
collectives._CopyToParallelRegion.backward = staticmethod(lambda ctx, grad: (grad, None))
""",
    ),
    Misplaced(
        name="a vocabulary that does not divide",
        layout="tp",
        should="65 rows over 2 ranks: rank 1 looks up the row after the one that it should. The embedding is wrong.",
        parameters=("embed.weight",),
        says=("embed", "row", "rank 1"),
        code="""
from paceline.parallel.tensor_parallel import plan_dry_run
plan_dry_run._describe_difference = lambda *_: ""  # the trial of the plan would find it before verify does
from dataclasses import replace

import torch
from paceline.parallel.tensor_parallel.sharded_tensor import RULES, ShardPropagatingTensor

_plain = RULES["embedding"]

def embedding(call):
    ids, weight = call["input"], call["weight"]
    if isinstance(weight, ShardPropagatingTensor) and weight.sharding.dim == 0 and weight.group.rank == 1:
        start, stop = weight.sharding.ranges(1)[0]
        mine = (ids >= start) & (ids < stop)
        call = replace(call, arguments=call.arguments | {"input": torch.where(mine, (ids + 1).clamp(max=stop - 1), ids)})
    return _plain(call)

RULES["embedding"] = embedding
""",
    ),
    Misplaced(
        name="keys of another head",
        layout="tp",
        should="In attention each rank's queries meet the next head's keys: qkv and all before it are wrong.",
        says=("qkv|attention|head|blocks.0", "output|forward|loss"),
        code="""
from paceline.parallel.tensor_parallel import plan_dry_run
plan_dry_run._describe_difference = lambda *_: ""  # the trial of the plan would find it before verify does
from paceline.parallel.tensor_parallel.rules import matmul as products
_keys = products._local_keys
_turn = [0]

def keys(x, q, dim, *, grouped):
    found = _keys(x, q, dim, grouped=grouped)
    _turn[0] += 1
    return found.roll(1, -3) if _turn[0] % 2 else found

products._local_keys = keys
""",
    ),
    Misplaced(
        name="a ring over the wrong heads",
        layout="cp=2,tp=2",
        ranks=4,
        should="Under tp the keys that go round the ring are the next head's: qkv of the first block and all after it.",
        says=("qkv|attention|head|blocks.0", "output|forward|loss"),
        code="""
from paceline.parallel.context_parallel.function_mode import ContextParallelMode
_ring_attention = ContextParallelMode._ring_attention

def ring_attention(self, query, key, value, *, sharded_query, **given):
    key = key if sharded_query is None else key.roll(1, -3)
    return _ring_attention(self, query, key, value, sharded_query=sharded_query, **given)

ContextParallelMode._ring_attention = ring_attention
""",
    ),
    Misplaced(
        name="pieces of a sequence that leave a unit without their history",
        layout="dp_shard=2,tp=2,sequence=true",
        ranks=4,
        should="What is cut along the sequence comes out of fsdp's hooks detached: all before the last norm is not trained.",
        parameters=("blocks.", "embed"),
        says=("not trained", "gradient is zero|no gradient"),
        code="""
from paceline.parallel.tensor_parallel import user_hook_local_shards as seam
_back = seam._CallShards.restore

def put_back(self, values):
    leaves, shape = seam.tree_flatten(values)
    along = {n for n, split in self._sharded.items() if split.sharding.dim == 1}
    return _back(self, seam.tree_unflatten([leaf.detach() if n in along else leaf for n, leaf in enumerate(leaves)], shape))

seam._CallShards.restore = put_back
""",
    ),
    Misplaced(
        name="columns of another rank at the start",
        layout="tp",
        should="Start weights differ: tp rank 1 holds rank 0's half of blocks.1.up.weight.",
        parameters=("blocks.1.up.weight",),
        steps=(0, 1),
        says=("initial weights|before the first step", "rank 1"),
        code="""
from paceline.parallel.tensor_parallel import tensor_parallel as placed
_split_over = placed.split_model_in_group

def split_model_in_group(model, *, plan, group):
    whole = model.blocks[1].up.weight.detach().clone()
    made = _split_over(model, plan=plan, group=group)
    mine = model.blocks[1].up.weight
    if group.rank == 1 and len(mine) < len(whole):
        mine.data.copy_(whole[: len(mine)])
    return made

placed.split_model_in_group = split_model_in_group
""",
    ),
    Misplaced(
        name="exponentials of the own piece of the vocabulary",
        layout="tp",
        should="The loss is wrong: cross-entropy's sum of exponentials is each rank's own, not summed over tp.",
        says=("loss", r"\btp\b", "vocabulary|logits|head|cross"),
        code="""
from paceline.parallel.tensor_parallel import plan_dry_run
plan_dry_run._describe_difference = lambda *_: ""  # the trial of the plan would find it before verify does
import torch
from paceline.parallel.tensor_parallel.rules import loss as rules_loss

def forward(ctx, local, own, mine, kept, dim, group):
    top = group.all_reduce_max(local.amax(dim, keepdim=True))
    shares = (local - top).exp()
    total = shares.sum(dim, keepdim=True)
    found = group.all_reduce((local.gather(dim, own) - top).masked_fill(~mine, 0.0))
    ctx.save_for_backward(shares / total, own, mine, kept)
    ctx.dim = dim
    return (total.log() - found).masked_fill(~kept, 0.0)

rules_loss._ShardedCrossEntropy.forward = staticmethod(forward)
""",
    ),
    Misplaced(
        name="the norm counted twice for replicated tensors",
        layout="tp",
        should="Gradients agree; the norm counts what both tp ranks hold twice, so clipping makes them too small.",
        says=("norm|clip", "twice|counted|too large|replicated|every rank"),
        code="""
from paceline.parallel.module_access.sharded_tensors import ShardedTensors
ShardedTensors.owns = lambda self, name: bool(self.shard_specs(name)[self._world.rank].boxes)
""",
    ),
    Misplaced(
        name="labels moved after the cut",
        example="zoo:llama",
        layout="cp",
        should="At each border of the sequence's pieces the label is missing or another's: labels moved after the cut.",
        says=("label|target|count", "border|cut|cp|sequence"),
        code="""
from paceline.parallel.context_parallel import context_parallel as context
_shard_batch = context.shard_batch

def shard_batch(batch, *, sequence, ranks, rank, shift_labels=False):
    found = _shard_batch(batch, sequence=sequence, ranks=ranks, rank=rank, shift_labels=False)
    if shift_labels:
        labels = found["labels"]
        found["labels"] = torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], -100)], 1)
    return found

context.shard_batch = shard_batch
""",
    ),
    Misplaced(
        name="positions from zero on each rank",
        layout="cp",
        should="Each cp rank counts positions from 0: position_embed.weight's gradient has nothing in the later rows.",
        says=("position", r"\bcp\b|sequence"),
        verdict="refused",
        code="""
from paceline.parallel.context_parallel import sequence_sharding as context_cut
context_cut.SequenceSharding.positions = lambda self, rank, *, device=None: torch.arange(self.local_length(rank), device=device)
""",
    ),
    Misplaced(
        name="a rank attends to its own keys only",
        layout="cp",
        should="Attention on each cp rank sees the keys of its own part only: the log-sum-exp is not merged.",
        says=("attention|qkv|blocks.0", r"\bcp\b|sequence"),
        verdict="refused",
        code="""
from paceline.parallel.context_parallel.ring_attention import Ring
_blocks = Ring.blocks
Ring.blocks = lambda self, owner: _blocks(self, owner) if owner == self.world.rank else iter(())
""",
    ),
    Misplaced(
        name="gradients of one part of the sequence",
        layout="cp",
        should="Gradients are added over data ranks only, not over cp: each holds its part of the sequence's.",
        says=(r"\bcp\b", "not summed|not added|not reduced|a part|own part"),
        code="""
from paceline.parallel.gradients import partition as divide
_reducer = divide.build_reducer
divide.build_reducer = lambda named_parameters, world, grid, compression=None: _reducer(
    named_parameters, type(world).alone(), grid
)
""",
    ),
    Misplaced(
        name="rows of two experts change places",
        example="zoo:mixtral",
        layout="ep",
        should="On each rank the tokens of its two experts change places: the experts' gradients are each other's.",
        says=("expert", "different output"),
        code="""
from dataclasses import replace
from paceline.parallel.expert_parallel import expert_parallel as experts
from paceline.trainer.checks import parallel_checks as context
_plan_route = experts.plan_route
context.check_experts = lambda **_: None  # which would find it before verify does

def plan_route(index, *, ranges, world):
    route = _plan_route(index, ranges=ranges, world=world)
    start, stop = ranges[world.rank]
    return replace(route, expert_index=stop - start - 1 - route.expert_index)

experts.plan_route = plan_route
""",
    ),
    Misplaced(
        name="experts' gradients divided by the ep degree",
        example="zoo:mixtral",
        layout="ep",
        should="Experts' gradients are half of the right ones, 1/ep: tokens of all ranks have come, nothing to average.",
        says=("expert", r"factor of (0\.5|1/2)|1/2|0\.5|half", r"\bep\b|experts?.parallel|ranks"),
        code="""
from paceline.parallel.gradients.combined_reducer import ComposedReducer
_finish = ComposedReducer.finish

def finish(self, *, divisor):
    first, *rest = [r.finish(divisor=divisor if n == 0 else divisor * 2) for n, r in enumerate(self._reducers)]
    return first and all(rest)

ComposedReducer.finish = finish
""",
    ),
]
