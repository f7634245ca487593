"""Local SGD sites equal one process that does the same, through stops and inside other layouts."""

import json
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from paceline.comm.process_group import World
from paceline.comm.rank_threads import thread_worlds
from paceline.config.update_rule import parse_update
from paceline.errors import LayoutError
from paceline.parallel.module_access.parameters import trainable_parameters
from paceline.parallel.module_access.sharded_tensors import ShardedTensors, model_tensors
from paceline.planner.layout.local_sgd_checks import assign_fragments, fragment_to_send
from paceline.step.local_sgd.outer_step import Fragment, SiteGroup
from paceline.step.local_sgd.site_synchronizer import SiteSynchronizer
from tests.conftest import Shop
from tests.step.test_hogwild import SELDOM
from tests.step.test_pipedream import JOB as STASH

PLANTS = """
import os
from paceline.step.local_sgd import site_synchronizer as outer

plant = os.environ.get("PLANT", "")
if plant == "forgotten":  # the outer momentum
    keep = outer.Fragment.apply

    def take(self):
        self._optimizer.state.clear()
        keep(self)

    outer.Fragment.apply = take
if plant == "at once":  # what should be taken later
    send = outer.Fragment.send

    def sent(self, step):
        send(self, step)
        self.apply() if self.due_step is not None else None

    outer.Fragment.send = sent
if plant == "whole":  # gradients divided by the count of all sites
    from paceline.step.step_totals import TotalsReduction

    divisor = TotalsReduction.divisor
    TotalsReduction.divisor = lambda self: divisor(self) * 2
"""
JOB = STASH + PLANTS


@pytest.fixture
def bench(shop: Shop) -> Shop:
    shop.write("local.py", JOB)
    return shop


def verified(shop: Shop, ranks: int, *words: str, plant: str = "", steps: int = 9) -> dict[str, Any]:
    words = ("verify", "local.py", "--ranks", str(ranks), "--steps", str(steps), "--json", *words)
    ended = shop.run(*words, timeout=400, environ={"PLANT": plant})
    assert ended.code in (0, 4), ended.text
    found: dict[str, Any] = ended.json()
    return found


def assert_same(found: dict[str, Any], *, rungs: int = 3) -> None:
    assert found["verdict"] in ("bitwise", "rounding"), json.dumps(found["lines"], indent=1)
    assert found["reference"].startswith("serial ")
    assert len(found["rungs"]) == rungs
    assert all(rung["compared"].get("weights", 0) > 20 for rung in found["rungs"][1:])


MICRO = ("--train.micro_batch_size", "2")


def test_two_sites_of_one_rank_are_their_serial_reference(bench: Shop) -> None:
    assert_same(verified(bench, 2, "--update", "local,every=3", *MICRO, "--job.dropout", "0.2", "--job.clip", "0.5"))


def test_an_outer_step_in_fragments_taken_later_is_its_serial_reference(bench: Shop) -> None:
    update = "diloco,every=4,fragments=3,delay=2,mix=0.25"
    assert_same(verified(bench, 3, "--update", update, "--train.micro_batch_size", "3", "--job.samples", "43"))


@pytest.mark.parametrize(
    "layout",
    [
        "dp_replicate=2,dp_shard=2",
        pytest.param("dp_replicate=2,tp=2", marks=pytest.mark.soak),
        pytest.param("pp=2,dp_replicate=2", marks=pytest.mark.soak),
        pytest.param("dp_replicate=2,dp_shard=2,zero=1", marks=pytest.mark.soak),
        pytest.param("dp_replicate=2,dp_shard=2,zero=2", marks=pytest.mark.soak),
        pytest.param("dp_replicate=2,cp=2", marks=pytest.mark.soak),
    ],
)
def test_a_site_may_be_any_layout(bench: Shop, layout: str) -> None:
    words = ("--layout", layout, "--update", "diloco,every=2,fragments=2", "--train.micro_batch_size", "1")
    assert_same(verified(bench, 4, *words, "--job.kind", "llama", "--job.clip", "0.3"))


@pytest.mark.soak
@pytest.mark.parametrize("terms", ["1", "2"])
def test_a_site_without_a_target_makes_no_update(bench: Shop, terms: str) -> None:
    """Three sites of two, one and one sample; one of them has at times the only sample without the second term."""
    bench.write("local.py", SELDOM)
    words = ("--update", "local,every=3", "--train.micro_batch_size", "1", "--job.terms", terms)
    found = verified(bench, 3, *words)
    assert found["verdict"] in ("bitwise", "rounding"), json.dumps(found["lines"], indent=1)
    run = ("--ranks", "3", *words, "--run-dir", "run", "--train.steps", "9")
    ended = bench.run("train", "local.py", *run)
    assert ended.code == 0, ended.text
    ended = bench.run("train", "local.py", *run, "--job.none", "true", "--run-dir", "none")
    term = "second" if terms == "2" else "loss"
    assert ended.code == 1 and f"the count of {term} is 0 over the whole global batch" in ended.text, ended.text


@pytest.mark.parametrize("terms", ["1", "2"])
def test_schedules_advance_on_a_site_without_a_target_and_on_one_without_a_sample(shop: Shop, terms: str) -> None:
    shop.write("seldom.py", SELDOM)
    words = ("--update", "local,every=3", "--train.micro_batch_size", "1", "--ranks", "3")
    ended = shop.run("train", "seldom.py", *words, "--job.terms", terms, "--train.steps", "8", "--run-dir", "run")
    assert ended.code == 0, ended.text
    advanced = [(shop.path / f"steps-{rank}").read_text().split() for rank in range(3)]
    assert all(steps == [str(step) for step in range(9)] for steps in advanced), advanced


def test_running_statistics_meet(bench: Shop) -> None:
    bench.write("local.py", bench_job())
    found = verified(bench, 2, "--update", "local,every=2", "--job.norm", "true", "--train.micro_batch_size", "3")
    assert found["verdict"] in ("bitwise", "rounding"), json.dumps(found["lines"], indent=1)


def bench_job() -> str:
    return "from job import make_job as plain\n\n\ndef make_job(norm: bool = False):\n    return plain(norm=norm)\n"


@pytest.mark.parametrize(
    ("plant", "update"),
    [
        ("forgotten", "diloco,every=2"),
        pytest.param("at once", "diloco,every=4,delay=2", marks=pytest.mark.soak),
        pytest.param("whole", "local,every=2", marks=pytest.mark.soak),
    ],
)
def test_a_meeting_that_goes_otherwise_is_another_training(bench: Shop, plant: str, update: str) -> None:
    words = ("--update", update, *MICRO, "--job.rule", "sgd")
    assert verified(bench, 2, *words, plant=plant, steps=12)["verdict"] == "different"


def train(run: str, steps: int, *words: str, ranks: int = 2) -> list[str]:
    return ["train", "local.py", "--ranks", str(ranks), "--run-dir", run, "--train.steps", str(steps), *words]


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        (2, ("--update", "diloco,every=4,fragments=2,delay=3")),
        pytest.param(
            4, ("--update", "diloco,every=5,delay=2", "--layout", "dp_replicate=2,dp_shard=2"), marks=pytest.mark.soak
        ),
        pytest.param(
            4,
            ("--update", "diloco,every=4,fragments=2,delay=3", "--layout", "pp=2,dp_replicate=2"),
            marks=pytest.mark.soak,
        ),
    ],
)
def test_saving_evaluating_and_going_on_change_no_bit(bench: Shop, ranks: int, words: tuple[str, ...]) -> None:
    words = (*words, "--train.micro_batch_size", "1")
    straight = bench.run(*train("straight", 13, *words, ranks=ranks))
    often = bench.run(
        *train("often", 13, *words, "--checkpoint.every", "3", "--eval.every", "4", ranks=ranks),
    )
    killed = bench.run(
        *train(
            "parts",
            13,
            *words,
            "--checkpoint.every",
            "3",
            "--survive.restarts",
            "0",
            "--faults",
            "kill rank=1 step=9",
            ranks=ranks,
        )
    )
    then = bench.run(*train("parts", 13, *words, ranks=ranks))
    assert not any(run.code for run in (straight, often, then)), straight.text + often.text + then.text
    assert killed.code == 1 and "resumed: step-00000006" in then.text, killed.text + then.text
    assert len({bench.digest(run) for run in ("straight", "often", "parts")}) == 1
    assert not bench.run("ckpt", "verify", "parts").code
    told = next(e for e in reversed(events(bench, "straight")) if e["event"] == "Staleness")["told"]
    assert len(told) == ranks and all(one["sent_bytes"] > 0 for one in told)


def events(bench: Shop, run: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (bench.path / run / "events.jsonl").read_text().splitlines()]


@pytest.mark.soak
def test_another_number_of_sites_is_refused_unless_it_is_allowed(bench: Shop) -> None:
    words = ("--update", "local,every=3", *MICRO)
    assert not bench.run(*train("run", 4, *words)).code
    other = bench.run(*train("run", 6, *words, ranks=4))
    assert other.code == 2 and "update: was local,every=3 of 2 sites, is local,every=3 of 4 sites" in other.text
    allowed = bench.run(*train("run", 6, *words, "--allow", "update", ranks=4))
    assert allowed.code == 0, allowed.text
    alone = bench.run(*train("run", 8, "--update", "sync", *MICRO, "--allow", "update", ranks=1))
    assert alone.code == 0, alone.text


BAD = {
    "has no option 'evry'": ("--update", "local,evry=3"),
    "every must be an integer from 1": ("--update", "local,every=0"),
    "momentum must be a number from 0 to below 1": ("--update", "diloco,momentum=1"),
    "mix must be a number from 0 to 1": ("--update", "diloco,mix=nan"),
    "needs several sites, but layout fsdp has one": ("--update", "local", "--layout", "fsdp"),
    "needs processes, not threads": ("--update", "local", "--layout", "threads"),
    "a delay of 4 updates in a round of 4": ("--update", "diloco,every=4,delay=4"),
    "fragments must be an integer from 1 to 1,000": ("--update", "diloco,every=2000000,fragments=1000000"),
    "9 fragments in a round of 4": ("--update", "diloco,every=4,fragments=9"),
    "one site would never train": ("--update", "local", "--train.micro_batch_size", "8"),
    "--train.exact with --update local": ("--update", "local", "--train.exact"),
    "sync_bn with --update local": ("--update", "local", "--train.buffers", "sync_bn"),
    "each site would have an average of its own": ("--update", "local", "--job.ema", "true"),
}


@pytest.mark.parametrize("said", BAD)
def test_what_it_can_not_be_had_with_is_said(bench: Shop, said: str) -> None:
    ended = bench.run(*train("run", 2, *BAD[said]))
    assert ended.code == 2 and said in ended.text, ended.text
    assert "Traceback" not in ended.text


class Equal(World):
    """Three sites that are in the same state, seen from one of them."""

    def start_all_reduce(self, tensor: torch.Tensor, *, op: str = "sum") -> Callable[[], None]:
        if op == "sum":
            tensor += 2 * tensor
        return lambda: None

    def all_reduce(self, tensor: torch.Tensor, *, op: str = "sum") -> torch.Tensor:
        self.start_all_reduce(tensor, op=op)
        return tensor


def sites_of_three(
    update: str, model: torch.nn.Module, told: list[int], *, stage: int | None = None
) -> SiteSynchronizer:
    named = trainable_parameters(model) if stage is None else trainable_parameters(model)[2 * stage :][:2]
    weights = ShardedTensors(world=World.alone(), tensors=model_tensors(model))
    return SiteSynchronizer(
        rule=parse_update(update),
        named_parameters=named,
        tensors=weights,
        peers=Equal(world_size=3),
        sync_after_update=lambda: told.append(1),
        on_write=lambda: None,
    )


SCRIPT = """
import json
import threading
import torch, torch.nn as nn, torch.nn.functional as F
import paceline as pl

if __name__ == "__main__":
    ids = torch.randint(0, 16, (24, 5), generator=torch.Generator().manual_seed(0))
    job = pl.Job(
        model=lambda: nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 16)),
        loss=lambda output, batch: (F.cross_entropy(output.flatten(0, 1), batch[1].flatten(), reduction="sum"), 1),
        train_data=torch.utils.data.TensorDataset(ids, ids),
        optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.1),
        global_batch_size=4,
        settings={"train.steps": 3, "train.micro_batch_size": 2},
    )
    with pl.Run(job, ranks=2, update="local,every=500", run_dir="run") as run:
        for batch in run.batches():
            run.step(batch)
        own = [p.detach().clone() for p in run.model.parameters()]
        told = run.generate(torch.tensor([[3, 1, 4]]), num_tokens=40).tolist()
        assert all(torch.equal(a, b) for a, b in zip(own, run.model.parameters(), strict=True))
        (run.folder / f"told-{run.rank}.json").write_text(json.dumps([told, float(own[0].sum())]))
"""


def test_what_sites_generate_is_their_mean_s(bench: Shop) -> None:
    bench.write("script.py", SCRIPT)
    ended = bench.call([*bench.command()[:3], "script.py"], timeout=400)
    assert ended.code == 0, ended.text
    told = [json.loads((bench.path / f"run/told-{rank}.json").read_text()) for rank in range(2)]
    assert told[0][0] == told[1][0] and told[0][1] != told[1][1]


def test_a_fragment_is_due_on_every_stage_also_where_there_is_nothing_of_it() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(7, 7), torch.nn.Linear(7, 7))
    told: list[list[int]] = [[], []]
    stages = [sites_of_three("diloco,every=4,fragments=2,delay=3", model, told[i], stage=i) for i in range(2)]
    for step in range(1, 12):
        for sites in stages:
            sites.synchronize_due(step)
        dues = [[fragment.due_step for fragment in sites.fragments] for sites in stages]
        assert dues[0] == dues[1] and any(dues[0]) == (step > 1), "a checkpoint has those of the first rank alone"
        for sites, found in zip(stages, dues, strict=True):
            for fragment, due in zip(sites.fragments, found, strict=True):
                kept = {(what, name): tensor for what, name, tensor in fragment.saved_state()}
                fragment.restore(lambda *key, kept=kept: kept.get(key), due_step=due)  # type: ignore[misc]
                assert fragment.due_step == due and (fragment._pending_gradient is not None) == bool(
                    fragment.members and due
                )
    assert len(told[0]) == len(told[1]) == 4, "spreading an update is for all ranks of a site together"


def test_sites_that_have_just_met_are_their_mean_also_when_a_run_goes_on() -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(40, 40)
    own = {name: p.detach().clone() for name, p in model.named_parameters()}
    sites = sites_of_three("local,every=3", model, [])
    sites.restore(own, step=6)
    with sites.mean_weights():
        assert all(torch.equal(p, own[name]) for name, p in model.named_parameters())
    sites.restore({**own, "frozen since": torch.zeros(3)}, step=7)
    with sites.mean_weights():
        assert not all(torch.equal(p, own[name]) for name, p in model.named_parameters()), "the mean of three, rounded"
    assert all(torch.equal(p, own[name]) for name, p in model.named_parameters())


def test_a_buffer_that_a_forward_makes_as_long_as_its_input_stays_a_site_s_own() -> None:
    model = torch.nn.BatchNorm1d(4)
    model.register_buffer("places", torch.arange(5.0), persistent=False)
    sites = sites_of_three("local,every=3", model, [])
    model.running_mean.fill_(1.0)
    model.register_buffer("places", torch.arange(9.0), persistent=False)
    for step in range(1, 7):
        sites.synchronize_due(step)
        with sites.mean_weights() as own:
            assert "running_mean" in own and "places" not in own, "another site's may have another length"


@pytest.mark.parametrize("update", ["local,every=3", "diloco,every=6,fragments=2"])
def test_running_statistics_of_sites_are_their_mean_right_after_a_meeting(update: str) -> None:
    """Not only where somebody looks between two meetings, where the mean is taken for the look."""
    peers = thread_worlds(replicas=3, world=World.alone(), timeout_seconds=30)
    models = [torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.BatchNorm1d(4)) for _ in peers]
    found: list[float] = [0.0] * len(peers)

    def run(site: int) -> None:
        model, rule = models[site], parse_update(update)
        norm = model[1]
        weights = ShardedTensors(world=World.alone(), tensors=model_tensors(model))
        told = {"sync_after_update": lambda: None, "on_write": lambda: None}
        sites = SiteSynchronizer(
            rule=rule, named_parameters=trainable_parameters(model), tensors=weights, peers=peers[site], **told
        )
        for step in range(1, rule.every + 1):
            norm.running_mean.fill_(float(site + step))
            sites.synchronize_due(step)
            if fragment_to_send(step, update=rule) == 0:
                found[site] = float(norm.running_mean[0]) - step
        sites.wait_for_all()

    threads = [threading.Thread(target=run, args=(site,)) for site in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [1.0, 1.0, 1.0]


def test_each_fragment_is_sent_once_in_a_round_and_holds_as_much_as_another() -> None:
    for every, fragments in ((1, 1), (5, 1), (7, 3), (8, 8), (500, 4)):
        update = parse_update(f"diloco,every={every},fragments={fragments}")
        sent = [fragment_to_send(step, update=update) for step in range(1, 3 * every + 1)]
        for start in range(0, 3 * every, every):
            found = [one for one in sent[start : start + every] if one is not None]
            assert sorted(found) == list(range(fragments))
    sizes = {f"w{i}": size for i, size in enumerate([10, 500, 20, 480, 30, 460, 1, 499])}
    place = assign_fragments(sizes, fragments=4)
    assert list(place.values()) == sorted(place.values()) and set(place.values()) == {0, 1, 2, 3}
    assert assign_fragments({}, fragments=3) == {}


def test_an_update_is_read_back_as_it_is_written() -> None:
    for text in (
        "sync",
        "pipedream,vertical",
        "local,every=8",
        "diloco,every=500",
        "diloco,every=9,lr=0.5,fragments=2",
        "diloco,every=1000003,lr=0.123456789,momentum=0.9999999,delay=1000001,mix=0.3333333333",
        "ps,staleness=1000000",
    ):
        assert str(parse_update(text)) == text and parse_update(str(parse_update(text))) == parse_update(text)
    assert str(parse_update("diloco,every=9,lr=1.0")) == "diloco,every=9,lr=1"
    with pytest.raises(LayoutError, match="twice"):
        parse_update("local,every=3,every=4")


def test_mix_is_the_share_of_the_site_s_own_newer_weights() -> None:
    model = torch.nn.Linear(3, 2)
    rule = parse_update("diloco,every=4,delay=1,lr=1,momentum=0,mix=0.25")
    part = Fragment(trainable_parameters(model), rule=rule, sites=SiteGroup(World.alone()))
    with torch.no_grad():
        sent = model.weight.add_(1.0).clone()
        part.send(4)
        newer = model.weight.add_(2.0).clone()
    part.apply()
    torch.testing.assert_close(model.weight.detach(), 0.25 * newer + 0.75 * sent)
