"""Options of other tools are refused with the line to type, and the command accepts that line."""

import re
import shlex
from pathlib import Path

import pytest

from paceline.cli import main, split_settings
from paceline.commands.command_table import VERBS, TrainOptions
from paceline.config.merge_settings import known_settings
from paceline.config.other_tool_options import OTHER_TOOL_OPTIONS, find_equivalent
from paceline.nodes.launcher_options import LAUNCHER_OPTIONS, SLURM_OPTIONS, TIME_LIMITS, slurm_hours


@pytest.mark.parametrize("name", OTHER_TOOL_OPTIONS)
def test_what_is_to_be_typed_is_there(name: str) -> None:
    words = OTHER_TOOL_OPTIONS[name].replacement.split()
    if not words[0].startswith("--"):
        return  # another command, or nothing
    own, known = words[0][2:], known_settings()
    assert own in known or own.startswith("job.") or own.replace("-", "_") in TrainOptions.__dataclass_fields__


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        (("--epochs", "3"), "--train.epochs 3"),
        (("--epoch", "3"), "--train.epochs 3"),
        (("--num_train_epochs=3",), "--train.epochs 3"),
        (("--batch-size", "32"), "--train.global_batch_size 32"),
        (("--per-device-train-batch-size", "4"), "--train.micro_batch_size 4"),
        (("--lr", "0.1"), "--job.lr 0.1"),
        (("--bf16",), "--train.precision bf16"),
        (("--nnodes", "2"), "--nodes 2:HOST"),
        (("--local-rank=0",), "leave --local-rank out"),
        (("--gpus", "8"), "--ranks 8"),
        (("--tensor-parallel-size", "2"), "--layout tp=2"),
        (("--staleness", "4"), "--update ps,staleness=4"),
    ],
)
def test_an_option_of_another_tool(typed: tuple[str, ...], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "job.py", *typed]) == 2
    assert f"to do: {expected}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("train job.py --nodes 2 --rank-per-node 2", "--ranks-per-node 2"),
        ("train job.py --nodes 2:h --nproc-per-node 4", "--ranks-per-node 4"),
        ("train job.py --nodes 2 --nproc_per_node=4", "--ranks-per-node 4"),
        ("train job.py --nodes 2 --devices 4", "--ranks-per-node 4"),
        ("train job.py --nodes 2:h --ranks 4", "--ranks-per-node 2"),
        ("train job.py --nodes 2:h --world-size 8", "--ranks-per-node 4"),
        ("train job.py --nnodes=2:4", "--nodes 2:4:HOST"),
        ("train job.py --nnodes 1 --gpus 4", "--ranks 4"),
        ("train job.py --nodes 2:h --node-rank 1", "--node 1"),
        ("train job.py --node-rank 1", "--nodes 2:HOST --node 1"),
        ("train job.py --nnodes 2 --nproc-per-node 4 --node-rank 0 --master-addr h1 --master-port 29500",
         "--nodes 2:h1:29500 --ranks-per-node 4 --node 0"),
        ("train job.py --nnodes 2 --rdzv-endpoint h1:29400 --rdzv-backend c10d", "--nodes 2:h1"),
        ("train job.py --num-machines 2 --num-processes 8 --machine-rank 1 --main-process-ip h1",
         "--nodes 2:h1 --ranks-per-node 4 --node 1"),
        ("train job.py --node 2:host1", "--nodes 2:host1"),
        ("train job.py --nodes 0:host1", "--nodes 2:host1"),
        ("train job.py --nodes 4:2:host1", "--nodes 2:4:host1"),
        ("train job.py --nodes 0:4:host1", "--nodes 1:4:host1"),
        ("train job.py --nodes 0", "--nodes 2"),
        ("train job.py --nodes 2 --node 3", "--nodes 4:HOST --node 3"),
        ("train job.py --layot fsdp", "--layout fsdp"),
        ("train job.py --exclude vm", "srun --exclude vm --ntasks-per-node 1 paceline train ..."),
        ("doctor --exclude vm", "srun --exclude vm --ntasks-per-node 1 paceline doctor ..."),
        ("doctor --nnodes 3", "--nodes 3:HOST"),
        ("doctor --node 2:host1", "--nodes 2:host1"),
        ("doctor --node 2", "--nodes 3:HOST --node 2"),
        ("doctor --ranks-per-node 2", "leave --ranks-per-node out"),
        ("submit job.py --nodes 2:host1", "--nodes 2"),
        ("submit job.py --nodes 2:4:host1 --to ray", "--nodes 2:4"),
        ("submit job.py --nodes 2:4:host1", "--nodes 4"),
        ("submit job.py --nodes 4:2 --to ray", "--nodes 2:4"),
        ("submit job.py --node 2:host1", "--nodes 2"),
        ("submit job.py --nnodes 2", "--nodes 2"),
        ("submit job.py --nproc-per-node 8", "--ranks-per-node 8"),
        ("submit job.py --time 1-12:30:00", "--hours 36.5"),
        ("submit job.py --hours 90:00", "--hours 1.5"),
        ("submit job.py --partition gpu", "--using partition=gpu"),
        ("submit job.py --nodes 2 --cpus-per-task 8", "--using cpus-per-task=8"),
        ("submit job.py --cpus_per_task=8", "--using cpus-per-task=8"),
        ("submit job.py --error x.err", "--using error=x.err"),
        ("submit job.py --output x.out", "leave --output out"),
        ("submit job.py --job-name mine", "leave --job-name out"),
        ("submit job.py --mem 100G", "leave --mem out"),
        ("submit job.py --mem-per-cpu=4G", "leave --mem-per-cpu out"),
        ("submit job.py --exclusive", "leave --exclusive out"),
        ("submit job.py --gres gpu:8", "--ranks-per-node 8"),
        ("submit job.py --gres=gpu:h100:8", "--ranks-per-node 8"),
        ("submit job.py --gres nvme:1", "--using gres=nvme:1"),
        ("submit job.py -N 2", "--nodes 2"),
        ("submit job.py -N2", "--nodes 2"),
        ("submit job.py --nodes 2 -p gpu", "--using partition=gpu"),
        ("submit job.py -A me", "--using account=me"),
        ("submit job.py -t 1-0", "--hours 24"),
        ("submit job.py -c 8", "--using cpus-per-task=8"),
        ("submit job.py -J mine", "leave -J out"),
        ("submit job.py -o x.out", "leave -o out"),
        ("submit job.py --to k8s --image a --mem 100G", "--using memory=100Gi"),
        ("submit job.py --to k8s --image a --cpus-per-task 8", "--using cpus=8"),
        ("submit job.py --to=ray --cpus-per-task 8", "leave --cpus-per-task out"),
        ("submit job.py --to sagemaker --image a -p gpu", "leave -p out"),
        ("submit job.py --to kubernetes", "--to k8s"),
        ("submit job.py --to sbatch", "--to slurm"),
        ("submit job.py --to slrum", "--to slurm"),
        ("submit job.py --price 3,2", "--price 3.2"),
        ("submit job.py --price 3.2USD", "--price 3.2"),
        ("submit job.py --price 1,234.5", "--price 1234.5"),
        ("submit job.py --ranks-per-node 1,000", "--ranks-per-node 1000"),
        ("submit job.py -N 2 -n 16", "--nodes 2 --ranks-per-node 8"),
        ("train job.py -N 2 -n 8", "--nodes 2:HOST --ranks-per-node 4"),
        ("train job.py -n 4", "--ranks 4"),
        ("train job.py -np 4", "--ranks 4"),
        ("train job.py -p gpu", "srun --partition gpu --ntasks-per-node 1 paceline train ..."),
        ("train job.py --nodes 2 --rdzv_endpoint host1:29500", "--nodes 2:host1:29500"),
        ("train job.py --nodes 2:4 --rdzv-endpoint=host1", "--nodes 2:4:host1"),
        ("train job.py --nodes 2 --node_rank 0 --master_addr host1", "--nodes 2:host1 --node 0"),
        ("train job.py --nodes 2 --node-rank 1", "--nodes 2:HOST --node 1"),
        ("train job.py --nodes 2:host1 --master_port 29500", "--nodes 2:host1:29500"),
        ("train job.py --nodes 2:host1 --main_process_port 29400", "--nodes 2:host1:29400"),
        ("train job.py --nodes 2:host1 --master_addr host1", "leave --master-addr out"),
        ("train job.py --nodes 2:host1:29400 --rdzv-endpoint host1:29500", "--nodes 2:host1:29500"),
        ("train job.py --nodes 2:host1,host2", "--nodes 2:host1"),
        ("train job.py --nodes 2:4:host1,host2:29500", "--nodes 2:4:host1:29500"),
        ("train job.py --nodes 2:root@host1", "--nodes 2:host1"),
        ("doctor --nodes 2:host[1-2]", "--nodes 2:host1"),
        ("train job.py --max-restarts 5", "--survive.restarts 5"),
        ("train job.py --restarts 5", "--survive.restarts 5"),
        ("plan job.py --nodes 4:host1", "--nodes 4"),
        ("plan job.py --nnodes 2 --nproc-per-node 4", "--nodes 2 --ranks-per-node 4"),
        ("verify job.py --nnodes 2", "leave --nnodes out"),
        ("verify job.py --nodes 2", "leave --nodes out"),
    ],
)  # fmt: skip
def test_the_words_for_several_nodes(typed: str, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(typed.split()) == 2
    told = capsys.readouterr().err
    assert re.search(rf"to do: {re.escape(expected)}(\n|, |; )", told), told


@pytest.mark.parametrize(
    ("typed", "cause"),
    [
        ("train job.py --max-restarts 5", "Paceline counts the restarts in a row, without a new checkpoint in between"),
        ("submit job.py --run-dir runs/a --output x.out", "the script sets it: the log is runs/a/submit/slurm-JOBID.out"),
        ("submit job.py --output x.out", "the script sets it: the log is slurm-JOBID.out in the folder `submit` of the run"),
        ("submit job.py --array 1-4 --run-dir=runs/a -o x", "the log is runs/a/submit/slurm-JOBID-TASK.out"),
        ("submit job.py --mem 100G", "the script asks for all memory of each node (--mem=0)"),
        ("submit job.py --to kubernetes", "did you mean 'k8s'?"),
        ("train job.py --nodes 2:host1 --master_addr host2", "--nodes says where the nodes meet"),
        ("train job.py --nodes 2:host1,host2", "HOST is the first machine alone"),
        ("train job.py --nodes 2:root@host1", "Paceline does not log in to it"),
    ],
)  # fmt: skip
def test_the_cause_is_true(typed: str, cause: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(typed.split()) == 2
    told = capsys.readouterr().err
    assert re.search(rf"likely cause: .*{re.escape(cause)}", told), told


@pytest.mark.parametrize("name", [name for name, option in OTHER_TOOL_OPTIONS.items() if option.reason])
def test_a_reason_is_a_sentence(name: str) -> None:
    first, *_, verb = OTHER_TOOL_OPTIONS[name].reason.split()[:3]
    assert first in ("it", "the", "torchrun", "ZeRO", "Paceline"), OTHER_TOOL_OPTIONS[name].reason
    assert verb


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("resume runs/a", "paceline train JOB --resume runs/a"),
        ("restart job.py", "paceline train job.py --resume"),
        ("resume", "paceline train JOB --resume"),
        ("run job.py --ranks 2", "paceline train job.py --ranks 2"),
        ("launch job.py", "paceline train job.py"),
        ("start", "paceline train JOB"),
        ("status runs/a", "paceline why runs/a"),
        ("logs", "paceline why RUN"),
        ("eval runs/a", "paceline evaluate runs/a"),
        ("init digits", "paceline new digits"),
    ],
)
def test_the_verb_of_another_tool(
    typed: str, expected: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(typed.split()) == 2
    told = capsys.readouterr().err
    assert re.search(rf"to do: {re.escape(expected)}(\n|; )", told), told
    assert "did you mean" not in told


POSITIONAL = {"doctor": [], "ckpt": ["ls"], "compare": ["a", "b"]}
NAMES = sorted({*OTHER_TOOL_OPTIONS, *LAUNCHER_OPTIONS, *SLURM_OPTIONS, *TIME_LIMITS})


@pytest.mark.parametrize("nodes", [[], ["--nodes", "2"]], ids=["one machine", "nodes"])
@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_accepts_what_it_suggests(verb: str, nodes: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    own = VERBS[verb].option_class().__dataclass_fields__
    nodes = nodes if "nodes" in own else []
    for name in NAMES:
        if name in own:
            continue
        flag = f"--{name.replace('_', '-')}"
        assert main([verb, *POSITIONAL.get(verb, ["job.py"]), *nodes, flag, "2"]) != 0
        for hint in re.findall(r"to do: (--.*)", capsys.readouterr().err):
            words, settings = split_settings(shlex.split(hint.partition(", ")[0]))
            flags = [word[2:].replace("-", "_") for word in words if word.startswith("--")]
            assert set(flags) <= set(own), (flag, hint)
            assert VERBS[verb].takes_settings or not settings, (flag, hint)
            names = [word[2:] for word in settings if word.startswith("--")]
            assert all(word in known_settings() or word.startswith("job.") for word in names), (flag, hint)


@pytest.mark.parametrize(
    ("text", "hours"),
    [
        ("90", 1.5),
        ("90:00", 1.5),
        ("24:00:00", 24),
        ("2-0", 48),
        ("1-12:30", 36.5),
        ("1-0:0:36", 24.01),
        ("a day", None),
    ],
)
def test_time_limits_of_slurm(text: str, hours: float | None) -> None:
    assert slurm_hours(text) == hours


def test_all_of_them_are_told_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "job.py", "--epochs", "3", "--wibble", "1", "--batch-size", "8"]) == 2
    told = capsys.readouterr().err
    assert "1. train has no option --epochs" in told and "3. train has no option --batch-size" in told


def test_what_nobody_has_is_none() -> None:
    assert find_equivalent("--wibble", "3") is None


def test_an_option_that_is_a_number_says_so_of_each_word(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "job.py", "--ranks", "two", "--wibble", "1"]) == 2
    told = capsys.readouterr().err
    assert "--ranks two: expected an integer." in told and "no option --wibble" in told and "tyro" not in told
    assert main(["verify", "job.py", "--ranks=2", "--steps=1.5"]) == 2
    assert "--steps 1.5: expected an integer." in capsys.readouterr().err
    assert main(["plan", "job.py", "--seconds", "soon"]) == 2
    assert "--seconds soon: expected a number." in capsys.readouterr().err
