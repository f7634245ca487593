"""Faults of data parallelism: one function of Paceline is replaced while the job is imported."""

from tests.verification.diagnosis.fault_in_example import Planted

IN_PARTS = [
    Planted(
        name="accumulation forgotten",
        example="text",
        ranks=2,
        words=("--train.micro_batch_size", "4"),
        should="Each rank's gradient holds only its last microbatch (6 and 7 of 8); the earlier ones are lost.",
        says=("microbatch|accumul",),
        code="""
from paceline.parallel.data_parallel.reducer import BucketReducer
_before = BucketReducer.before_backward

def before_backward(self, *, last, has_samples=True):
    if last:
        for member in self._named_parameters:
            member.parameter.grad = None
    _before(self, last=last, has_samples=has_samples)

BucketReducer.before_backward = before_backward
""",
    ),
    Planted(
        name="the tied embedding reduced twice",
        example="hf_llama",
        ranks=3,
        parameters=("model.embed_tokens.weight",),
        should="The gradient of the embedding is 3 times too large, the number of ranks: it was reduced twice.",
        says=("factor of 3|3 times|times 3", "twice|again|number of ranks|two times"),
        code="""
from paceline.parallel.data_parallel.reducer import BucketReducer
_finish = BucketReducer.finish

def finish(self, *, divisor):
    done = _finish(self, divisor=divisor)
    for member in self._named_parameters:
        if member.name == "model.embed_tokens.weight":
            self._world.all_reduce(member.parameter.grad)
    return done

BucketReducer.finish = finish
""",
    ),
    Planted(
        name="gradients averaged once more",
        example="digits_cnn",
        ranks=4,
        should="Every gradient is a quarter of what it should be: divided by the number of ranks once too often.",
        says=(r"factor of (0\.25|1/4)|1/4|0\.25|4 times too small|quarter|divided", "rank"),
        code="""
from paceline.parallel.data_parallel.reducer import BucketReducer
_finish = BucketReducer.finish

def finish(self, *, divisor):
    done = _finish(self, divisor=divisor)
    for member in self._named_parameters:
        member.parameter.grad.div_(self._world.world_size)
    return done

BucketReducer.finish = finish
""",
    ),
    Planted(
        name="a mean of the ranks' means",
        example="text",
        ranks=3,
        should="Each rank's loss was divided by its own count of targets, not the joint one: a mean of means.",
        says=("count",),
        code="""
from paceline.step import step_totals as telling
_global_counts = telling.global_counts
SPACE = 32

def loss(logits, batch):
    targets = batch[-1].flatten()
    kept = targets != SPACE
    return F.cross_entropy(logits.flatten(0, 1)[kept], targets[kept], reduction="sum"), kept.sum()

def global_counts(local, *, world, names):
    totals = _global_counts(local, world=world, names=names)
    if world.world_size == 1:
        return totals
    return {name: torch.as_tensor(local[name], dtype=torch.float64) * world.world_size for name in names}

telling.global_counts = global_counts
changed_job(lambda job: {"count": lambda batch: (batch[-1] != SPACE).sum()})
""",
    ),
    Planted(
        name="running statistics left local",
        example="digits_cnn",
        ranks=2,
        parameters=("features.1.running", "features.1.num_batches"),
        should="features.1's running mean holds only this rank's microbatches: BatchNorm's statistics were not joined.",
        says=("statistic|running|BatchNorm", "rank|local|own|joined|fold"),
        quick=True,
        code="""
from paceline.parallel.batchnorm.running_statistics import StatisticsRecorder
_fold = StatisticsRecorder.fold

def fold(self, *, num_micro):
    if self._world.world_size == 1:
        return _fold(self, num_micro=num_micro)
    for tape in self._norm_tapes:
        now = tape.initial_statistics
        for index in sorted(tape.calls):
            there = tape.initial_statistics
            for after, weight in tape.calls[index]:
                now, there = after + (1.0 - weight) * (now - there), after
        tape.write_statistics(now, sum(tape.count_increments.values()))
    self._has_run = False
    return True

StatisticsRecorder.fold = fold
""",
    ),
    Planted(
        name="the short last batch dropped",
        example="digits_cnn",
        ranks=3,
        steps=(2,),
        should="In step 2 the ranks read other samples than one process, which has the epoch's last 6 there.",
        says=("sample|batch|data|order",),
        code="""
from paceline.data.loader import MapStyleLoader
_start = MapStyleLoader.__init__

def start(self, *, partition, **rest):
    whole = partition.replicas == 1
    _start(self, partition=replace(partition, drop_last=partition.drop_last or not whole), **rest)

MapStyleLoader.__init__ = start
_read = read_digits

def read_digits():
    train, held_out = _read()
    return TensorDataset(*train[:70]), held_out
""",
    ),
    Planted(
        name="one sample read twice",
        example="text",
        ranks=3,
        should="Rank 1 reads one sample twice and one not at all.",
        says=("rank 1", "twice|sample|index|read"),
        code="""
from paceline.data.loader import MapStyleLoader
_request = MapStyleLoader._request

def wanted(self, batch, index):
    asked = _request(self, batch, index)
    if self._partition.replicas > 1 and self._partition.replica == 1:
        return replace(asked, indices=(*asked.indices[:-1], asked.indices[0]))
    return asked

MapStyleLoader._request = wanted
""",
    ),
    Planted(
        name="two ranks deal themselves the same microbatches",
        example="digits_cnn",
        ranks=2,
        words=("--train.micro_batch_size", "16"),
        should="Ranks 0 and 1 both run microbatches 0 and 2; nobody runs 1 and 3.",
        says=("microbatch|sample", "twice|both|same|nobody|no rank|missing|not read"),
        code="""
from paceline.data import loader as feed
_deal = feed.assign_microbatches
feed.assign_microbatches = lambda num_micro, *, replica, replicas: _deal(num_micro, replica=0, replicas=replicas)
""",
    ),
    Planted(
        name="the last step's gradient not cleared",
        example="digits_cnn",
        ranks=2,
        steps=(2,),
        should="Step 2's gradient holds step 1's as well: gradients are not cleared between steps.",
        says=("previous|last step|step 1|step before|clear|zero_grad|stale|left over",),
        code="""
from paceline.parallel.data_parallel.reducer import BucketReducer
_begin = BucketReducer.begin

def begin(self):
    kept = {member.index: member.parameter.grad for member in self._named_parameters}
    _begin(self)
    for member in self._named_parameters:
        member.parameter.grad = kept[member.index]

BucketReducer.begin = begin
""",
    ),
    Planted(
        name="one weight not updated on one rank",
        example="digits_cnn",
        ranks=3,
        parameters=("head.weight",),
        should="head.weight stays as it was on rank 2, though its gradient is right: the optimizer does not hold it.",
        says=("rank 2", "not updated|unchanged|did not (move|change)|stays|update|optimizer"),
        code="""
from paceline.trainer.setup import build_training_setup as built
_make = built.make_update

def make_update(job, settings, plan, model, placed, rules, *, world):
    made, given = _make(job, settings, plan, model, placed, rules, world=world)
    take = made._step_optimizers

    def stale(step):
        kept = model.head.weight.detach().clone()
        take(step)
        model.head.weight.data.copy_(kept)

    if world.world_size > 1 and world.rank == 2:
        made._step_optimizers = stale
    return made, given

built.make_update = make_update
""",
    ),
    Planted(
        name="a gradient norm of a part",
        example="text",
        ranks=2,
        steps=(1, 2),
        should="The ranks clip by different norms: each measures only its own half of the gradients.",
        says=("clip|norm",),
        code="""
from paceline.trainer.setup import build_training_setup as built
_make = built.make_update

def make_update(job, settings, plan, model, placed, rules, *, world):
    made, given = _make(job, settings, plan, model, placed, rules, world=world)
    whole = made._measure_norm
    if world.world_size > 1:
        made._measure_norm = lambda gradients: whole(gradients[world.rank :: world.world_size])
    return made, given

built.make_update = make_update
""",
    ),
    Planted(
        name="a schedule stepped twice on one rank",
        example="text",
        ranks=3,
        steps=(2,),
        should="Gradients agree; in step 2 rank 2's learning rate is another: its schedule is a step ahead.",
        says=("rank 2", r"\blr\b|learning rate|schedule"),
        code="""
from paceline.trainer.setup import build_training_setup as built
_make = built.make_update

def make_update(job, settings, plan, model, placed, rules, *, world):
    made, given = _make(job, settings, plan, model, placed, rules, world=world)
    if world.world_size > 1 and world.rank == 2:
        made.lr_schedulers = made.lr_schedulers * 2
    return made, given

built.make_update = make_update
""",
    ),
    Planted(
        name="bf16 on the wire",
        example="text",
        ranks=3,
        should="Every reduced gradient is right to 3 digits only: something rounds to bf16 on the way.",
        says=("bf16|bfloat16|precision|rounded|digits|low",),
        code="""
from paceline.parallel.data_parallel.reducer import _AllReduceBucket
_fill_payload = _AllReduceBucket._fill_payload

def payload(self):
    sent = _fill_payload(self)
    sent.copy_(sent.bfloat16())
    return sent

_AllReduceBucket._fill_payload = payload
""",
    ),
    Planted(
        name="two gradients change places on one rank",
        example="hf_llama",
        ranks=2,
        parameters=("model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        should="Rank 1 sends up_proj's gradient as gate_proj's and the other way round: another order there.",
        says=("gate_proj", "up_proj", "swap|place|order|exchange|mixed|another parameter"),
        code="""
from paceline.parallel.data_parallel.reducer import _AllReduceBucket
_fill_payload = _AllReduceBucket._fill_payload

def payload(self):
    names = [member.name for member in self.members]
    pair = [f"model.layers.0.mlp.{kind}_proj.weight" for kind in ("gate", "up")]
    if my_rank() == 1 and set(pair) <= set(names):
        one, two = (self.parameters[names.index(name)] for name in pair)
        one.grad, two.grad = two.grad, one.grad
    return _fill_payload(self)

_AllReduceBucket._fill_payload = payload
""",
    ),
    Planted(
        name="a shuffle of each rank's own",
        example="text",
        ranks=4,
        should="Ranks 1 to 3 read other samples than the one order gives them: their shuffle has another seed.",
        says=("rank 1", "sample|order|shuffle|read|seed"),
        code="""
from paceline.data.loader import MapStyleLoader
_start = MapStyleLoader.__init__

def start(self, *, seed, partition, **rest):
    own = partition.replica if partition.replicas > 1 else 0
    _start(self, seed=seed + own, partition=partition, **rest)

MapStyleLoader.__init__ = start
""",
    ),
    Planted(
        name="one gradient stays local",
        example="text",
        ranks=4,
        parameters=("blocks.0.mlp.2.weight",),
        should="blocks.0.mlp.2.weight holds each rank's own gradient: it was not reduced. All others agree.",
        says=("not reduced|own gradient|local|not summed",),
        code="""
from paceline.parallel.data_parallel.reducer import _AllReduceBucket
_fill_payload, _finish = _AllReduceBucket._fill_payload, _AllReduceBucket.finish
SKIPPED = "blocks.0.mlp.2.weight"

def payload(self):
    self.kept = {m.name: m.parameter.grad.clone() for m in self.members if m.name == SKIPPED}
    return _fill_payload(self)

def finish(self, divisor):
    _finish(self, None)
    for member in self.members:
        if member.name in self.kept:
            member.parameter.grad.copy_(self.kept[member.name])
        if divisor is not None:
            member.parameter.grad.div_(divisor)

_AllReduceBucket._fill_payload, _AllReduceBucket.finish = payload, finish
""",
    ),
]
