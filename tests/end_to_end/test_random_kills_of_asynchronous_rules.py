"""A run that is killed at random and resumed ends with the same bits under every asynchronous update rule."""

import json
import random
from pathlib import Path

import pytest

from tests.conftest import SMALL_JOB, Shop

RULES = {  # ranks, words
    "pipedream": (3, ("--layout", "pp", "--update", "pipedream", "--train.micro_batch_size", "6")),
    "vertical": (2, ("--layout", "pp", "--update", "pipedream,vertical", "--train.micro_batch_size", "6")),
    "2bw": (2, ("--layout", "pp", "--update", "2bw", "--train.micro_batch_size", "2")),
    "local": (3, ("--update", "local,every=3", "--train.micro_batch_size", "2")),
    "diloco": (2, ("--update", "diloco,every=5,fragments=3,delay=3", "--train.micro_batch_size", "2")),
    "diloco in sites of two": (
        4,
        (
            "--layout",
            "dp_replicate=2,dp_shard=2",
            "--update",
            "diloco,every=4,delay=1",
            "--train.micro_batch_size",
            "2",
        ),
    ),
    "topk": (2, ("--compress", "topk,ratio=0.2", "--train.micro_batch_size", "2")),
    "powersgd": (3, ("--compress", "powersgd,rank=2", "--train.micro_batch_size", "2")),
}
STEPS = 14
NET = """
class Net(nn.Sequential):
    def __init__(self, norm, dropout):
        super().__init__(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Dropout(0.1)) for _ in range(4)))
"""


@pytest.fixture
def bench(shop: Shop) -> Shop:
    plain, _, rest = SMALL_JOB.partition("def loss(")
    head = plain[: plain.index("class Net")]
    shop.write("job.py", f"{head}\n{NET}\n\ndef loss({rest}")
    return shop


def kills(seed: int, ranks: int) -> tuple[str, list[str]]:
    """How often is saved, and a fault for each of some attempts, each later than the one before."""
    chance = random.Random(seed)
    every, step = chance.randint(1, 4), 0
    faults: list[str] = []
    for least in (every + 2, 9, 11)[: chance.randint(1, 3)]:
        step = max(step + 1, chance.randint(least, least + 2))
        point = "save" if not step % every and chance.random() < 0.5 else "step"
        kind = chance.choice(["kill", "kill", "stop", "raise"]) if point == "step" else "kill"
        faults.append(f"{kind} rank={chance.randrange(ranks)} step={step} point={point} attempt={len(faults) + 1}")
    return str(every), faults


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(1, 33))])
def test_killed_at_random_it_ends_with_the_same_bits(bench: Shop, seed: int) -> None:
    name = random.Random(seed).choice(list(RULES)) if seed > 2 else ("pipedream", "diloco", "2bw")[seed]
    ranks, words = RULES[name]
    every, faults = kills(seed, ranks)
    straight = bench.train("straight", *words, ranks=ranks, steps=STEPS)
    assert straight.code == 0, straight.text
    for fault in faults:
        ended = bench.train(
            "killed",
            *words,
            "--checkpoint.every",
            every,
            "--survive.restarts",
            "0",
            "--faults",
            fault,
            ranks=ranks,
            steps=STEPS,
        )
        assert ended.code in (1, 75), f"{name}: {fault}: {ended.text}"
    last = bench.train("killed", *words, "--checkpoint.every", every, ranks=ranks, steps=STEPS)
    assert last.code == 0 and "resumed: step-" in last.text, f"{name}: {faults}: {last.text}"
    assert bench.digest("killed") == bench.digest("straight"), f"{name}, saved every {every}: {faults}"
    assert samples(bench.path / "killed") == samples(bench.path / "straight")


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(6))
def test_servers_killed_at_random_come_back_to_the_same_bits(bench: Shop, seed: int) -> None:
    chance = random.Random(seed)
    servers, workers, every = chance.randint(1, 2), chance.randint(1, 2), str(chance.randint(1, 4))
    words = (
        "--update",
        f"ps,servers={servers},staleness=0",
        "--train.micro_batch_size",
        "2",
        "--checkpoint.every",
        every,
    )
    ranks = servers + workers
    straight = bench.train("straight", *words, ranks=ranks, steps=STEPS)
    assert straight.code == 0, straight.text
    steps = sorted(chance.sample(range(2, STEPS), k=2))
    faults = "; ".join(f"kill rank={chance.randrange(servers)} step={s} attempt={n}" for n, s in enumerate(steps, 1))
    killed = bench.train("killed", *words, "--faults", faults, ranks=ranks, steps=STEPS)
    assert killed.code == 0 and killed.text.count("; restarted in ") == len(steps), killed.text
    assert bench.digest("killed") == bench.digest("straight"), f"{words}: {faults}"
    assert samples(bench.path / "killed") == samples(bench.path / "straight")


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(6))
def test_a_race_killed_at_random_goes_on_with_every_sample_once(bench: Shop, seed: int) -> None:
    before = set(Path("/dev/shm").glob("paceline-*"))
    words = ("--update", "hogwild", "--train.micro_batch_size", "2")
    every, faults = kills(seed, 3)
    straight = bench.train("straight", *words, ranks=3, steps=STEPS)
    assert straight.code == 0, straight.text
    for fault in faults:
        ended = bench.train(
            "killed",
            *words,
            "--checkpoint.every",
            every,
            "--survive.restarts",
            "0",
            "--faults",
            fault,
            ranks=3,
            steps=STEPS,
        )
        assert ended.code in (1, 75), f"{fault}: {ended.text}"
    last = bench.train("killed", *words, "--checkpoint.every", every, ranks=3, steps=STEPS)
    assert last.code == 0 and "resumed: step-" in last.text, f"{faults}: {last.text}"
    assert samples(bench.path / "killed") == samples(bench.path / "straight")
    assert set(Path("/dev/shm").glob("paceline-*")) == before


@pytest.mark.parametrize("layout", ["pp", pytest.param("tp", marks=pytest.mark.soak)])
def test_one_rank_of_a_replica_asked_to_stop_as_it_evaluates_leaves_none_waiting(bench: Shop, layout: str) -> None:
    words = ("--layout", layout, "--eval.every", "4")
    ended = bench.train("run", *words, "--faults", "stop rank=1 step=4 point=eval", steps=8, timeout=60)
    assert ended.code == 75, ended.text
    again = bench.train("run", *words, steps=8)
    assert again.code == 0 and "resumed: step-00000004" in again.text and "eval 4" in again.text, again.text


def samples(run: Path) -> int:
    """As the newest checkpoint says."""
    newest = (run / "checkpoints" / "latest").read_text().strip()
    manifest = json.loads((run / "checkpoints" / newest / "manifest.json").read_text())
    found: int = json.loads(manifest["body"])["state"]["cursor"]["samples"]
    return found
