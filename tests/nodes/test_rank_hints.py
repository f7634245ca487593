"""What errors advise on several nodes: no option that `--nodes` excludes."""

import pytest

from paceline.comm.process_group import LaunchInfo, _hint_for_join
from paceline.errors import JobError
from paceline.launch.agent.worker_process import word_error_of_rank
from paceline.launch.inherited_environment import NODES
from paceline.nodes.rank_hints import hint_for_nodes, hint_for_submit
from tests.conftest import Shop

HINT = "--ranks 1, or a loss over the samples of a microbatch"


@pytest.mark.parametrize(
    ("hint", "expected"),
    [
        (HINT, "--ranks 1 in place of --nodes, or a loss over the samples of a microbatch"),
        ("--ranks 6", "--ranks-per-node 2"),
        ("--ranks 4", "--nodes 2:host1 --ranks-per-node 2"),
        ("--ranks 5, or --layout tp=3", "--ranks 5 in place of --nodes, or --layout tp=3"),
        (
            "--layout ddp --ranks 4 --update ps,servers=2, or x",
            "--layout ddp --nodes 2:host1 --ranks-per-node 2 --update ps,servers=2, or x",
        ),
        (
            "--layout pp --ranks 5 --update ps,servers=2, or x",
            "--layout pp --ranks 5 --update ps,servers=2 in place of --nodes, or x",
        ),
        ("on one machine, --ranks 1", "on one machine, --ranks 1"),
        ("--ranks-per-node 2", "--ranks-per-node 2"),
    ],
)
def test_hints_about_ranks(hint: str, expected: str) -> None:
    worded = hint_for_nodes(hint, nodes="3:host1")
    assert worded == expected
    assert hint_for_nodes(worded, nodes="3:host1") == expected, "a second time changes nothing"
    assert hint_for_nodes(hint, nodes="2:3") == expected.replace(":host1", ""), "played nodes have no host"


@pytest.mark.parametrize(
    ("hint", "expected"),
    [
        (HINT, "--nodes 1 --ranks-per-node 1, or a loss over the samples of a microbatch"),
        ("--ranks 6", "--ranks-per-node 2"),
        ("--layout ddp --ranks 4 --compress bf16", "--layout ddp --nodes 2 --ranks-per-node 2 --compress bf16"),
        ("on one machine, --ranks 5", "on one machine, --nodes 1 --ranks-per-node 5"),
        (
            "leave it out; --nodes 2:4:HOST continues with fewer nodes",
            "leave it out; --to ray --nodes 2:4 continues with fewer nodes",
        ),
    ],
)
def test_hints_of_submit_have_its_options(hint: str, expected: str) -> None:
    assert hint_for_submit(hint, num_nodes=3) == expected


def test_a_rank_of_several_nodes_does_not_advise_one_of_one_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    alone, one_of_many = JobError("bad.", hint=HINT), JobError("bad.", hint=HINT)
    monkeypatch.delenv(NODES, raising=False)
    word_error_of_rank(alone)
    monkeypatch.setenv(NODES, "3:host1")
    word_error_of_rank(one_of_many)
    assert alone.hint == HINT and one_of_many.hint.startswith("--ranks 1 in place of --nodes, or")


@pytest.mark.parametrize(
    ("nodes", "local_ranks", "expected"),
    [
        ("2:4:host1:29500", 2, "on every node: paceline doctor --nodes 4:host1:29500"),  # only one node is left
        ("2:host1", 1, "on every node: paceline doctor --nodes 2:host1"),
        ("2", 1, "PACELINE_LOOPBACK=1 before the same command"),
        ("", 2, "--ranks 1 to see whether one process works"),
    ],
)
def test_the_advice_after_ranks_did_not_meet(
    monkeypatch: pytest.MonkeyPatch, nodes: str, local_ranks: int, expected: str
) -> None:
    monkeypatch.setenv(NODES, nodes)
    assert expected in _hint_for_join(LaunchInfo(world_size=2, local_world_size=local_ranks, address="10.0.0.1"))


def test_the_screen_of_a_run_on_several_nodes_has_the_worded_hint(shop: Shop) -> None:
    line = "    kept = batch[-1] != 3\n    return F"
    job = (shop.path / "job.py").read_text()
    assert line in job
    shop.write("broken.py", job.replace(line, f"    raise pl.errors.JobError('bad.', hint={HINT!r})\n{line}"))
    words = ("train", "broken.py", "--run-dir", "many", "--train.steps", "2")
    done = shop.run(*words, "--nodes", "2", environ={"PACELINE_LOOPBACK": "1"})
    assert done.code == 2 and "to do: --ranks 1 in place of --nodes, or a loss" in done.text, done.text
