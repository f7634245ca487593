"""What the screen of `--nodes 2` without a host shows: who says a line, what is refused, and the line to go on with."""

import re
import signal

import psutil
import pytest

from paceline.cli import main
from paceline.commands import train as train_verb
from tests.conftest import Shop
from tests.launch.several_nodes.own_nodes import wait_for_step

LOOPBACK = {"PACELINE_LOOPBACK": "1", "PAUSE": "0.02"}
NUMBERED = re.compile(r"\[node [12]\] ")


def test_lines_of_other_nodes_begin_with_their_number_and_the_line_to_resume_is_said_once_as_typed(shop: Shop) -> None:
    process = shop.start(
        "train", "job.py", "--nodes", "3", "--run-dir", "many", "--train.steps", "2000", environ=LOOPBACK
    )
    wait_for_step(shop.path / "many", 5)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 75, out + err
    others = [line for line in err.splitlines() if "the screen of node 0" in line or "Stopped and saved" in line]
    numbered = [line for line in others if NUMBERED.match(line)]
    assert len(numbered) == 4 and {line[:8] for line in numbered} == {"[node 1]", "[node 2]"}, err
    assert not NUMBERED.search(out) and "starting 3 processes on 3 nodes" in out
    line = "Stopped and saved. Resume: paceline train job.py --run-dir many --nodes 3 --train.steps 2000"
    assert [said for said in (out + err).splitlines() if "Resume:" in said] == [line], out + err
    (saved,) = re.findall(r"^saved step-0*(\d+)", out, re.MULTILINE)
    point = f"  it continues from step {saved} (disk): many/checkpoints/step-{int(saved):08}"
    assert f"{line}\n{point}\n" in out + err, out + err
    shown = shop.run("why", "many")
    assert shown.out.endswith(f"{line.partition('saved. ')[2]}\n{point}\n"), shown.text


def test_the_line_to_resume_has_the_update_rule_and_the_ranks_as_typed(shop: Shop) -> None:
    words = ("--nodes", "2", "--ranks-per-node", "2", "--update", "ps,servers=1", "--run-dir", "many")
    process = shop.start("train", "job.py", *words, "--train.steps", "2000", environ=LOOPBACK)
    wait_for_step(shop.path / "many", 5)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 75, out + err
    line = (
        "Resume: paceline train job.py --run-dir many --nodes 2 --ranks-per-node 2 --update ps,servers=1 --train.steps"
    )
    assert line in out + err
    shown = shop.run("why", "many")
    assert line.removeprefix("Resume: ") in shown.text, shown.text


def test_after_the_death_of_the_head_the_command_itself_says_the_line_to_resume(shop: Shop) -> None:
    process = shop.start("train", "job.py", "--nodes", "2", "--train.steps", "2000", "--run-dir", "many",
                         environ=LOOPBACK)  # fmt: skip
    wait_for_step(shop.path / "many", 5)
    (head,) = [child for child in psutil.Process(process.pid).children() if child.cmdline()[-2:] == ["--node", "0"]]
    head.kill()
    out, err = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGKILL, out + err
    line = "node 0 was ended by SIGKILL. Resume: paceline train job.py --run-dir many --nodes 2 --train.steps 2000"
    assert [said for said in (out + err).splitlines() if "Resume:" in said] == [line], out + err
    assert f"{line}\n  it finds no complete checkpoint in many/checkpoints\n" in out + err, out + err


@pytest.mark.parametrize(
    ("words", "says", "hint"),
    [
        (("--ranks", "2"), "--ranks 2 with --nodes.", "--ranks-per-node"),
        (("--layout", "tp=3"), "tp=3 needs 3 ranks", ""),
        (("--layout", "auto"), "--layout auto can't be chosen on several nodes", ""),
        (("--allow", "colour"), "colour", ""),
        (("--resume", "runs/nowhere"), "there is no run runs/nowhere", "cd to the folder in which you train"),
        (("--resume",), "there is no run of job to resume", "the same command without --resume"),
    ],
)
def test_a_command_that_can_not_train_is_refused_once_before_a_network_is_made(
    shop: Shop, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str],
    words: tuple[str, ...], says: str, hint: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(shop.path)
    monkeypatch.setattr(train_verb, "run_local_nodes", lambda *_, **__: pytest.fail("nodes were made"))
    assert main(["train", "job.py", "--nodes", "2", *words]) == 2
    err = capfd.readouterr().err
    assert says in err and hint in err and err.count("error:") == 1, err


def test_the_advice_for_a_missing_job_depends_on_where_the_nodes_are(
    shop: Shop, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(shop.path)
    (shop.path / "job.py").rename(shop.path / "another.py")
    told: list[str] = []
    monkeypatch.setattr(train_verb, "tell_head", lambda _, error: told.append(error.hint))
    assert main(["train", "job.py", "--nodes", "2"]) == 2
    assert "to do: paceline new text" in capfd.readouterr().err and not told
    assert main(["train", "job.py", "--nodes", "2:host1"]) == 2
    advice = "the job file must be at the same path on every node"
    assert f"to do: {advice}" in capfd.readouterr().err and told == [advice]


def test_a_count_of_nodes_that_is_the_wrong_way_round_shows_the_right_one(
    shop: Shop, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(shop.path)
    assert main(["train", "job.py", "--nodes", "4:2"]) == 2
    assert "to do: --nodes 2:4" in capfd.readouterr().err


def test_one_node_alone_is_said(shop: Shop) -> None:
    done = shop.run("train", "job.py", "--nodes", "1:host1", "--train.steps", "2", "--run-dir", "alone")
    assert done.code == 0, done.text
    line = "--nodes 1:host1: this machine is the whole run; --nodes 2:host1 for two, the same line on both"
    assert done.err.count(line) == 1, done.err
