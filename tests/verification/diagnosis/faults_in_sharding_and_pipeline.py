"""Faults of sharding, pipelines, schedules and recomputation, written by an author who had not read the diagnosis."""

from tests.verification.diagnosis.fault_in_layout import Misplaced

IN_STAGES = [
    Misplaced(
        name="a dropped layer at a stage border",
        layout="pp",
        should="Stage 1 (rank 1) skips its first block: blocks.2's parameters have no gradient.",
        parameters=("blocks.2",),
        says=(r"blocks\.2", "no gradient|never|not run|skip|drop|missing", "stage 1|border"),
        quick=True,
        code="""
import torch
from paceline.parallel.pipeline.chain.stages import Stages
_block_handler = Stages._block_handler

def block_handler(self, number, placeholder):
    handle_call = _block_handler(self, number, placeholder)

    def skipping(call, *args, **kwargs):
        run = self._current_run
        if run is not None and run.stage.start == number > 0 and torch.is_grad_enabled():  # the cut tries it without
            run.num_called_blocks += 1  # or the stage itself would miss it
            return args[0]
        return handle_call(call, *args, **kwargs)

    return skipping

Stages._block_handler = block_handler
""",
    ),
    Misplaced(
        name="a stage border that begins another random stream",
        layout="pp",
        setup="DROPOUT = 0.3",
        should="Dropout after the last block draws from another stream on stage 1: another mask than one process's.",
        says=("dropout|random|stream|draw", "stage 1|border|rank 1|stages"),
        code="""
import torch.distributed as dist

_dropout = F.dropout

def dropout(x, *options, **named):
    if dist.is_initialized() and dist.get_rank() == 1:
        torch.rand(1)  # the stage's stream is one draw ahead; the one process has no group
    return _dropout(x, *options, **named)

F.dropout = dropout
""",
    ),
    Misplaced(
        name="a tie undone between stages",
        layout="pp",
        setup="TIED = True",
        parameters=("embed.weight",),
        should="embed.weight is tied to the head on stage 1; its gradient is not summed over the stages.",
        says=("tied|tie|both stages|stages 0", "stage", "not summed|not added|sum|part"),
        code="""
from paceline.parallel.pipeline.pipeline_model import PipelineModel
PipelineModel.ties = property(lambda self: {})
""",
    ),
    Misplaced(
        name="a tie summed on one stage only",
        layout="pp",
        setup="TIED = True",
        parameters=("embed.weight",),
        should="Stage 0 (rank 0) has the sum of embed.weight's gradients, stage 1 (rank 1) only its own part.",
        says=("stage 1", "rank 1", "not summed|not added|part|copies|copy"),
        code="""
from paceline.parallel.gradients import tied_parameters as ties
added = ties.sum_tied_gradients

def part(parameter, *, ranks, index, world):
    own = parameter.grad
    found = added(parameter, ranks=ranks, index=index, world=world)
    return own if world.rank == 1 else found

ties.sum_tied_gradients = part
""",
    ),
    Misplaced(
        name="gradients lost at a stage border",
        layout="pp",
        should="Stage 1 sends zeros back to stage 0: all gradients of stage 0 (rank 0) are zero.",
        parameters=("embed.weight",),
        says=("stage 0", "zero|no gradient|border|lost|sent back"),
        code="""
from paceline.step.pipeline.schedule_interpreter import Pipeline
_store = Pipeline._store_input_gradients

def back(self, key, gradients):
    _store(self, key, [None if g is None else g * 0 for g in gradients])

Pipeline._store_input_gradients = back
""",
    ),
    Misplaced(
        name="a microbatch run twice by the schedule",
        layout="pp",
        words=("--train.micro_batch_size", "2"),
        should="The pipeline runs microbatch 1's samples twice and microbatch 2's never.",
        says=("microbatch", "twice|never|2|same"),
        code="""
from paceline.step.pipeline.pipeline_forward_backward import _StepWork
_forward = _StepWork.forward

def forward(self, *, stage, microbatch, received):
    if len(self.microbatches) > 2:
        self.microbatches[2] = self.microbatches[1]
    return _forward(self, stage=stage, microbatch=microbatch, received=received)

_StepWork.forward = forward
""",
    ),
    Misplaced(
        name="a weight gradient left out",
        layout="pp,schedule=zb_h1",
        words=("--train.micro_batch_size", "2"),
        should="Stage 0's weight gradients lack the last microbatch: its W action is not done.",
        says=("stage 0", "microbatch"),
        code="""
from paceline.step.pipeline.schedule_interpreter import Pipeline
_weight = Pipeline._backward_weight

def weight(self, action, work):
    if action.stage == 0 and action.microbatch == 3:
        self._pending.pop((0, 3))
        work.before_backward(stage=0, microbatch=3)
        work.after_backward(stage=0, microbatch=3)
        return
    _weight(self, action, work)

Pipeline._backward_weight = weight
""",
    ),
    Misplaced(
        name="recomputed with another dropout",
        layout="ddp,remat=full",
        setup="BLOCK_DROPOUT = 0.2",
        should="Backward recomputes blocks with another dropout mask than forward's: gradients are wrong, the loss right.",
        says=("remat|recomput|again", "dropout|random|mask|stream"),
        code="""
import torch
from paceline.parallel.activation_checkpointing.checkpointing import RecomputedForward
_recompute = RecomputedForward.recompute

def recompute(self, call, args, kwargs):
    drops = [m for m in self._caches._block.modules() if isinstance(m, torch.nn.Dropout)] if hasattr(
        self._caches, "_block") else []
    call.inner = _shifted(call.inner)
    return _recompute(self, call, args, kwargs)

def _shifted(inner):
    def run(*args, **kwargs):
        torch.rand(7)
        return inner(*args, **kwargs)
    return run

RecomputedForward.recompute = recompute
""",
    ),
    Misplaced(
        name="rows off by one",
        layout="zero2",
        parameters=("blocks.0.up.weight",),
        should="Rank 1's rows of blocks.0.up.weight's gradient are moved by one: rows 32 to 63 are their neighbours'.",
        says=("rank 1", "row", "moved|shift|off by|order|roll|neighbour|places"),
        quick=True,
        code="""
from paceline.parallel.sharding.reduce_scatter_gradients import ScatterReducer
_finish = ScatterReducer.finish

def finish(self, *, divisor):
    done = _finish(self, divisor=divisor)
    for row_shard in self._row_shards:
        if row_shard.name == "blocks.0.up.weight" and self._shard_world.rank == 1:
            row_shard.parameter.grad = row_shard.parameter.grad.roll(1, 0)
    return done

ScatterReducer.finish = finish
""",
    ),
    Misplaced(
        name="reduce-scatter averages",
        layout="fsdp",
        should="Every gradient is half of what it should be: reduce-scatter averaged over 2 ranks and not summed.",
        says=(r"factor of (0\.5|1/2)|1/2|0\.5|half|2 times too small", "averag|divided|ranks"),
        code="""
from paceline.parallel.sharding import reduce_scatter_gradients as scatter
_start = scatter.start_reduce_scatter

def start(buffer, *, out, world):
    wait = _start(buffer, out=out, world=world)

    def landed():
        wait()
        out.div_(world.world_size)

    return landed

scatter.start_reduce_scatter = start
""",
    ),
    Misplaced(
        name="replicas of shards not added",
        layout="hsdp",
        ranks=4,
        should="Gradients are summed over dp_shard but not over dp_replicate: ranks 0, 1 and ranks 2, 3 differ.",
        says=("dp_replicate|replica", "not summed|not added|not reduced|a part|own part"),
        code="""
from paceline.parallel.sharding.reduce_scatter_gradients import ScatterReducer
_start = ScatterReducer.__init__

def start(self, *, replica_world=None, **rest):
    _start(self, replica_world=None, **rest)

ScatterReducer.__init__ = start
""",
    ),
    Misplaced(
        name="updated rows not gathered",
        layout="zero1",
        should="Gradients agree; after the update each rank's model has only its own rows new, the others are stale.",
        says=("stale|not gathered|not updated|unchanged|gather", "rank|rows"),
        code="""
from paceline.parallel.sharding.zero1_zero2_reducers import ParameterAllGather
ParameterAllGather.__call__ = lambda self: None
""",
    ),
    Misplaced(
        name="a stand-in microbatch counted",
        layout="fsdp",
        words=("--train.micro_batch_size", "1", "--train.global_batch_size", "3"),
        should="Rank 1 has one microbatch fewer, stands in with weight zero, and its stand-in was counted.",
        says=("microbatch|sample|stand", "rank 1|twice|counted|stand"),
        code="""
import torch
from paceline.step import forward_backward as passes

def run_stand_ins(self, step_batch, microbatches, num_missing, totals, *, step, stop):
    if not num_missing:
        return _run(self, step_batch, microbatches, num_missing, totals, step=step, stop=stop)
    stand_in = self._stand_ins.load_stand_in(step_batch, microbatches)
    terms = passes.forward(self._replica, stand_in, step=step, index=step_batch.num_micro, num_samples=1)
    totals = totals or self._totals_builder.new_reduction(step_batch, terms, stop=stop)
    self._totals_builder.start_reduction(totals)
    passes.backward(self._replica, torch.stack([t for t, _ in terms.values()]).sum(), last=True)
    return totals

_run = passes.MicrobatchForwardBackward._run_stand_ins
passes.MicrobatchForwardBackward._run_stand_ins = run_stand_ins
""",
    ),
    Misplaced(
        name="a bias summed over tp on the last stage",
        layout="pp=2,tp=2",
        ranks=4,
        should="Only on stage 1 (ranks 2, 3) are gradients of row-parallel biases 2 times the right ones, tp's degree.",
        parameters=("blocks.2", "blocks.3"),
        says=("stage 1", "ranks 2(,| and) 3", "factor of 2|2 times|times 2", r"\btp\b"),
        code="""
from dataclasses import replace

from paceline.parallel.tensor_parallel.rules import matmul as products
from paceline.parallel.tensor_parallel.sharded_tensor import RULES
from paceline.parallel.tensor_parallel.collectives import _CopyToParallelRegion

_plain = RULES["linear"]

def linear(call):
    weight, bias = call["weight"], call["bias"]
    if isinstance(weight, products.ShardPropagatingTensor) and weight.sharding.dim == 1 and bias is not None and my_rank() >= 2:
        return _plain(replace(call, arguments=call.arguments | {"bias": None})) + _CopyToParallelRegion.apply(bias, weight.group)
    return _plain(call)

RULES["linear"] = linear
""",
    ),
    Misplaced(
        name="one shard is never updated",
        layout="pp=2,dp_shard=2",
        ranks=4,
        parameters=("blocks.3.down.weight",),
        should="Rank 3 (stage 1, second shard) does not update its rows of blocks.3.down.weight.",
        says=("rank 3", "not updated|unchanged|did not (move|change)|stays|update", "stage 1|dp_shard"),
        code="""
from paceline.trainer.setup import build_training_setup as built
_make = built.make_update

def make_update(job, settings, plan, model, placed, rules, *, world):
    made, given = _make(job, settings, plan, model, placed, rules, world=world)
    take = made._step_optimizers
    mine = next((m.parameter for m in placed.named_parameters if m.name == "blocks.3.down.weight"), None)

    def stale(step):
        kept = mine.detach().clone()
        take(step)
        mine.data.copy_(kept)

    if world.world_size > 1 and world.rank == 3 and mine is not None:
        made._step_optimizers = stale
    return made, given

built.make_update = make_update
""",
    ),
]
