"""Faults that users make in the model, the loss, the data or the optimizer of their own job."""

from tests.verification.diagnosis.fault_in_example import Planted

IN_JOBS = [
    Planted(
        name="a mean called a sum",
        example="text",
        ranks=3,
        should="The loss returns a mean beside a count: it is no sum, so the gradient depends on how the batch is cut.",
        says=("loss", "mean|no sum|not a sum"),
        verdict="rounding",
        code="""
def loss(logits, batch):
    targets = batch[-1]
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten()), targets.numel()
""",
    ),
    Planted(
        name="a layer does not train on one rank",
        example="text",
        ranks=2,
        parameters=("place.weight",),
        should="place.weight has requires_grad=False on rank 1 only; ranks must agree on what trains.",
        says=("place.weight", "rank 1", "requires_grad|train|frozen"),
        verdict="different or refused",
        code="""
class GPT(GPT):
    def __init__(self, *args):
        super().__init__(*args)
        if my_rank() == 1:
            self.place.weight.requires_grad_(False)
""",
    ),
    Planted(
        name="a dataset that forgets the index on one rank",
        example="digits_cnn",
        ranks=2,
        should="Rank 1's samples hold other values than those the same indices give to one process: look at the data.",
        says=("rank 1", "data|sample|batch|read"),
        code="""
class Cached(torch.utils.data.Dataset):
    def __init__(self, inner):
        self.inner = inner

    def __len__(self):
        return len(self.inner)

    def __getitem__(self, index):
        return self.inner[0 if my_rank() == 1 else index]

_read = read_digits

def read_digits():
    train, held_out = _read()
    return Cached(train), held_out
""",
    ),
    Planted(
        name="a collate that drops an odd sample",
        example="hf_llama",
        ranks=3,
        should="The collation gives 10 samples for 11: what is trained on depends on how the batch is cut.",
        says=("collat|drop|sample", "cut|microbatch|fewer|10"),
        verdict="rounding",
        code="""
from torch.utils.data import default_collate

def even(samples):
    return default_collate(samples[: max(len(samples) // 2 * 2, 1)])

changed_job(lambda job: {"collate": even})
""",
    ),
    Planted(
        name="a collate that drops a sample on one rank",
        example="text",
        ranks=4,
        should="Rank 3's collation gives fewer samples than were asked: 7 of 8.",
        says=("rank 3", "collat|data|sample|batch|count"),
        code="""
from torch.utils.data import default_collate

def short(samples):
    return default_collate(samples[:-1] if my_rank() == 3 else samples)

changed_job(lambda job: {"collate": short})
""",
    ),
    Planted(
        name="another learning rate on one rank",
        example="digits_cnn",
        ranks=4,
        should="Gradients agree; rank 2's optimizer has another lr (3e-4, not 3e-3): look at the optimizer factory.",
        says=("rank 2", r"\blr\b|learning rate"),
        code="""
changed_job(lambda job: {"optimizer": lambda named: torch.optim.AdamW(
    [p for _, p in named], lr=3e-4 if my_rank() == 2 else 3e-3)})
""",
    ),
    Planted(
        name="another weight decay on one rank",
        example="text",
        ranks=2,
        parameters=("near.bias", "blocks.0.norm", "blocks.0.qkv.bias", "blocks.0.out.bias", "blocks.0.mlp", "norm."),
        should="Gradients agree; rank 1's optimizer has weight_decay 0.1 for biases and norms where rank 0 has 0.",
        says=("rank 1", "weight_decay|weight decay"),
        code="""
def optimizer(named):
    decay = {"params": [p for _, p in named if p.dim() > 1], "weight_decay": 0.1}
    rest = {"params": [p for _, p in named if p.dim() == 1], "weight_decay": 0.1 if my_rank() == 1 else 0.0}
    return torch.optim.AdamW([decay, rest], lr=4e-3, betas=(0.9, 0.95))

changed_job(lambda job: {"optimizer": optimizer})
""",
    ),
    Planted(
        name="start weights of each rank's own",
        example="hf_llama",
        ranks=3,
        should="No difference: rank 0's weights are given to all. But it must be said that they differed.",
        says=("initial weights differed",),
        verdict="rounding",
        code="""
def own_start(job):
    def build():
        torch.manual_seed(my_rank())
        return job.model()
    return {"model": build}

changed_job(own_start)
""",
    ),
    Planted(
        name="a constant drawn by each rank",
        example="digits_cnn",
        ranks=3,
        should="The forward of ranks 1 and 2 gives other values for the same weights and samples: the model itself "
        "differs there (a tensor that is no buffer), not the reduction.",
        says=("ranks? 1", "forward|model|output|loss"),
        code="""
class ConvNet(ConvNet):
    def __init__(self, width, dropout):
        super().__init__(width, dropout)
        generator = torch.Generator().manual_seed(my_rank())
        self.keep = (torch.rand(32 * width, generator=generator) > 0.2).float()

    def forward(self, images):
        return self.head(self.dropout(self.features(images).flatten(1)) * self.keep)
""",
    ),
    Planted(
        name="dropout from a generator of its own",
        example="text",
        ranks=2,
        should="The same step run twice differs: random draws from a generator that is not seeded for each microbatch.",
        says=("random|determin|generator|draw",),
        code="""
class OwnDropout(nn.Module):
    generator = torch.Generator().manual_seed(0)

    def forward(self, x):
        if not self.training:
            return x
        return x * (torch.rand(x.shape, generator=self.generator) > 0.1) / 0.9

class Block(Block):
    def __init__(self, *args):
        super().__init__(*args)
        self.dropout = OwnDropout()
""",
    ),
    Planted(
        name="dropout seeded by the rank",
        example="hf_llama",
        ranks=4,
        should="Ranks 1 to 3 draw other masks than one process does for the same microbatches: a draw that depends "
        "on the rank.",
        says=("ranks? 1", "random|draw|mask|dropout|forward|model"),
        code="""
from transformers import LlamaForCausalLM

class Llama(LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        self.model.norm.register_forward_pre_hook(self.drop)

    def drop(self, module, args):
        generator = torch.Generator().manual_seed(100 + my_rank())
        x = args[0]
        return (x * (torch.rand(x.shape, generator=generator) > 0.1) / 0.9).to(x.dtype)

changed_job(lambda job: {"model": lambda: Llama(job.model().config)})
""",
    ),
    Planted(
        name="a buffer only rank 0 updates",
        example="text",
        ranks=3,
        parameters=("center",),
        should="The forward writes the buffer center, and every rank gets what rank 0 saw: one process sees all.",
        says=("center", "buffer", "rank 0|forward"),
        code="""
class GPT(GPT):
    def __init__(self, width, *args):
        super().__init__(width, *args)
        self.register_buffer("center", torch.zeros(width))
        self.norm.register_forward_hook(self.shift)

    def shift(self, module, args, output):
        if self.training and my_rank() == 0:
            with torch.no_grad():
                self.center.lerp_(output.mean((0, 1)).to(self.center.dtype), 0.1)
        return output - self.center
""",
    ),
    Planted(
        name="a hook that halves one gradient on one rank",
        example="hf_llama",
        ranks=2,
        parameters=("model.layers.0.mlp.down_proj.weight",),
        should="Rank 1's own gradient of down_proj is half of what it should be, before the reduction; others agree.",
        says=("rank 1", r"half|0\.5|factor|hook|scaled"),
        code="""
def hooked(job):
    def build():
        model = job.model()
        if my_rank() == 1:
            model.model.layers[0].mlp.down_proj.weight.register_hook(lambda grad: grad * 0.5)
        return model
    return {"model": build}

changed_job(hooked)
""",
    ),
    Planted(
        name="bf16 on one rank",
        example="digits_cnn",
        ranks=3,
        should="Rank 1's forward is less precise than fp32 (autocast or other kernels there only).",
        says=("rank 1", "precision|autocast|bf16|rounded|forward|digits"),
        code="""
class ConvNet(ConvNet):
    def forward(self, images):
        with torch.autocast("cpu", torch.bfloat16, enabled=my_rank() == 1):
            out = super().forward(images)
        return out.to(images.dtype)
""",
    ),
    Planted(
        name="a BatchNorm in eval on one rank",
        example="digits_cnn",
        ranks=2,
        should="features.1 is in eval mode on rank 1: it normalises by running statistics there.",
        says=("rank 1", "eval|mode|features.1"),
        verdict="refused",
        quick=True,
        code="""
class ConvNet(ConvNet):
    def train(self, mode=True):
        super().train(mode)
        if my_rank() == 1:
            self.features[1].eval()
        return self
""",
    ),
    Planted(
        name="a loss multiplied by the number of ranks",
        example="text",
        ranks=4,
        should="Every gradient is 4 times too large, the number of ranks: the loss is multiplied by world_size.",
        says=("factor of 4|4 times|times 4|multiplied",),
        code="""
_loss = loss

def loss(logits, batch):
    total, count = _loss(logits, batch)
    return total * (dist.get_world_size() if dist.is_initialized() else 1), count
""",
    ),
    Planted(
        name="an all-reduce left over in the job",
        example="digits_cnn",
        ranks=2,
        parameters=("head.weight",),
        should="head.weight's gradient is twice what it should be: something reduces it a second time (the job's hook).",
        says=("factor of 2|twice|2 times|again|second",),
        code="""
def hooked(job):
    def build():
        model = job.model()
        if dist.is_initialized():
            model.head.weight.register_hook(all_reduced)
        return model
    return {"model": build}

def all_reduced(grad):
    total = grad.clone()
    dist.all_reduce(total)
    return total

changed_job(hooked)
""",
    ),
    Planted(
        name="a tie broken on one rank",
        example="hf_llama",
        ranks=2,
        parameters=("lm_head.weight", "model.embed_tokens.weight"),
        should="Rank 1's model has a parameter lm_head.weight of its own where rank 0 ties it to the embedding.",
        says=("rank 1", "lm_head.weight"),
        verdict="different or refused",
        code="""
def untied(job):
    def build():
        model = job.model()
        if my_rank() == 1:
            model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
        return model
    return {"model": build}

changed_job(untied)
""",
    ),
]
