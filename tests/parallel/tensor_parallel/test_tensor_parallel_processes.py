"""Tensor parallelism over real processes, with dropout as in one process and with sharding inside."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import Shop

ROOT = Path(__file__).resolve().parents[3]
START = """
import copy, json, os, sys, warnings
warnings.simplefilter("ignore")
sys.path.insert(0, {root!r})
import torch, torch._dynamo, torch.distributed as dist
from paceline.parallel.tensor_parallel.auto_plan import derive_plan
from paceline.parallel.tensor_parallel.tensor_parallel import split_model
from paceline.comm.process_group import World
from tests.parallel.tensor_parallel import tensor_parallel_models as models
import transformers
torch.set_num_threads(1)
RANKS = {ranks}

def world_of(rank, ranks, group=None):
    return World(rank=rank, world_size=ranks, backend="gloo", group=group or dist.group.WORLD)

def forked(work):
    pids = []
    for rank in range(RANKS):
        pids.append(os.fork())
        if pids[-1] == 0:
            try:
                dist.init_process_group("gloo", init_method=f"file://{{os.getcwd()}}/meet", rank=rank, world_size=RANKS)
                work(rank)
                dist.barrier()
                os._exit(0)
            except BaseException:
                import traceback; traceback.print_exc(); sys.stderr.flush()
                os._exit(1)
    codes = [os.waitpid(pid, 0)[1] for pid in pids]
    os.unlink("meet") if os.path.exists("meet") else None
    assert codes == [0] * RANKS, codes

def seeded(run):
    calls = [0]
    def wrapped(model):
        calls[0] += 1
        torch.manual_seed(calls[0])
        return models.in_double(run)(model)
    return wrapped

"""
EQUAL = """
def text_with_dropout():
    from paceline.examples.text import GPT
    torch.manual_seed(2)
    return GPT(models.WIDTH, 2, 4, 16, 0.1)

CASES = {
    "llama": (lambda: models.hugging_face("llama", attention_dropout=0.1), models.text_run),
    "llama eager": (lambda: models.hugging_face("llama", attention_dropout=0.1, attn_implementation="eager"), models.text_run),
    "gpt2": (lambda: models.hugging_face("gpt2", resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1), models.text_run),
    "t5": (lambda: models.hugging_face("t5", dropout_rate=0.1), models.text_run),
    "text": (text_with_dropout, models.gpt_run),
}
worst = {}
CASES = {n: c for n, c in CASES.items() if n in KINDS}
for name, (make, run) in CASES.items():
    for sequence in (False, True):
        model = make().double()
        plan = derive_plan(copy.deepcopy(model), run=run, ranks=RANKS)
        alone = models.train(copy.deepcopy(model), seeded(run))
        def work(rank):
            mine = copy.deepcopy(model)
            placed = split_model(mine, plan=plan, world=world_of(rank, RANKS), sequence=sequence)
            found = models.train(mine, seeded(run))
            found.parts = placed.shard_specs
            torch.save(found, f"rank-{rank}.pt")
        forked(work)
        found = [torch.load(f"rank-{rank}.pt", weights_only=False) for rank in range(RANKS)]
        apart = models.differences(alone, found)
        for n, part in found[0].parts.items():
            if part.is_full:  # the very bits, on every rank
                assert all(torch.equal(found[0].weights[n], r.weights[n]) for r in found), n
        worst[f"{name} {sequence}"] = {k: v for k, v in apart.items() if not v < models.FAR and alone.gradients.get(k.split()[-1], torch.ones(1)).abs().max() > 1e-12}
print(json.dumps(worst))
"""
SHARDED = """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

model = models.hugging_face("llama").double()
plan = derive_plan(copy.deepcopy(model), run=models.text_run, ranks=2)
alone = models.train(copy.deepcopy(model), models.in_double(models.text_run), steps=1)

def work(rank):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    mine = copy.deepcopy(model)
    placed = split_model(mine, plan=plan, world=world_of(mesh.get_local_rank("tp"), 2, mesh.get_group("tp")))
    for block in mine.model.layers:
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(mine, mesh=mesh["dp"])
    with models.Double():
        output = mine(input_ids=models.ids(), labels=models.text_labels())
    output.loss.backward()
    for name, p in mine.named_parameters():
        whole, part = alone.gradients[name], placed.shard_specs[name]
        apart = models.relative(p.grad.full_tensor(), part.extract(whole)) if part.extract(whole).abs().max() > 0 else 0.0
        assert apart < models.FAR, (name, apart)
    assert abs(float(output.loss) - alone.loss) < 1e-12

forked(work)
print("equal")
"""


def together(tmp_path: Path, text: str, *, ranks: int, timeout: float = 120) -> str:
    environ = {**Shop.environ({"OMP_NUM_THREADS": "1"}), "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-c", START.format(root=str(ROOT), ranks=ranks) + text]
    done = subprocess.run(
        command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=timeout, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip().splitlines()[-1]


def assert_equal(tmp_path: Path, kinds: list[str], *, ranks: int) -> None:
    found = json.loads(together(tmp_path, f"KINDS = {kinds}" + EQUAL, ranks=ranks, timeout=300))
    assert found == {f"{kind} {sequence}": {} for kind in kinds for sequence in (False, True)}


def test_two_processes_with_dropout_equal_one(tmp_path: Path) -> None:
    assert_equal(tmp_path, ["text"], ranks=2)


@pytest.mark.soak
@pytest.mark.parametrize("ranks", [2, 4])
def test_more_models_and_processes_with_dropout_equal_one(tmp_path: Path, ranks: int) -> None:
    assert_equal(tmp_path, ["llama", "llama eager", "gpt2", "t5", "text"], ranks=ranks)


@pytest.mark.soak
def test_sharded_on_a_second_axis(tmp_path: Path) -> None:
    assert together(tmp_path, SHARDED, ranks=4) == "equal"
