"""Each unsupported layout is refused before the first step, in our own words and with its own message.

EARLY is refused before any process starts; LATE when the model is known. `docs/refusals.md` lists combinations that no
model makes possible.
"""

import re
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from paceline.config.layout import parse_layout
from paceline.config.merge_settings import read_requested_settings
from paceline.config.task import Task
from paceline.planner.layout.mesh import resolve_mesh
from paceline.planner.layout.pipeline_options import refuse_schedule
from tests.conftest import Shop, no_process
from tests.end_to_end import refused_layout_models
from tests.end_to_end.forked_job_ranks import try_pair
from tests.matrix.matrix_page import patterns, stands

pytestmark = pytest.mark.one_worker
HERE = Path(__file__).parent
FILES = {
    "broken.toml": "[roles\n",
    "role.toml": '[roles]\n"layers.*.q" = "column"\n"layers.*.o" = "rows"\n',
    "both.toml": '[roles]\n"layers.*.o" = "rows"\n"blocks.*.q" = "row"\n',
    "key.toml": '[roles]\n"layers.*.q" = { role = "column", head = 4 }\n',
    "name.toml": '[roles]\n"blocks.*.q" = "column"\n',
    "empty.toml": "[roles]\n",
    "table.toml": '[role]\n"layers.*.q" = "column"\n',
    "tied.toml": '[roles]\n"embed" = "embedding"\n"head" = "row"\n',
    "integers.toml": '[roles]\n"layers.*.up" = "column"\n"layers.*.down" = "row"\n',
    "sections.toml": '[roles]\n"layers.*.up" = { role = "column", sections = [16, 8] }\n"layers.*.down" = "row"\n',
    "two.txt": "rank 0: F0 F1 B0 B1\nrank 1: F0 B0 F1 B1\n",
    "bad.txt": "rank 0: F0 F1 B0 B1\nrank 1: F0 X0 F1 B1\n",
    "dead.txt": "rank 0: F0 B0 F1 B1\nrank 1: F1 B1 F0 B0\n",
    "gap.txt": "rank 0: F0 F2 B0 B2\nrank 1: F0 B0 F2 B2\n",
    "half.txt": "rank 0: F0 F1 B0 B1\nrank 1: F0 B0 F1\n",
    "three.txt": "rank 0: F0 B0\nrank 1: F0 B0\nrank 2: F0 B0\n",
}
EARLY: dict[str, tuple[str, int, tuple[str, ...], str]] = {
    "a product for other ranks": ("pp=2,dp_shard=3,tp=2", 8, (), "pp=2 × dp_shard=3 × tp=2 needs 12 ranks, you have 8"),
    "a rest that does not divide": ("tp=3,dp=-1", 8, (), "8 ranks are not divisible by 3"),
    "two rests": ("tp=-1,dp=-1", 4, (), "one axis may be -1"),
    "hsdp on two ranks": ("hsdp", 2, (), "dp_replicate=2 × dp_shard=2 needs 4 ranks, you have 2"),
    "an axis of another name": ("tpp=2", 2, (), "did you mean 'tp'"),
    "half a rank": ("tp=1.5", 2, (), "an axis needs a count, got '1.5'"),
    "an axis twice": ("tp=2,tp=4", 4, (), "has tp twice"),
    "an axis by both its names": ("dp_replicate=2,dp=2", 2, (), "dp is short for dp_replicate"),
    "a word where axes are": ("fsdp,tp", 4, (), "'tp' in 'fsdp,tp' has no count"),
    "a count for a word": ("ddp=3", 2, (), "'ddp' in 'ddp=3' is a layout name and takes no count"),
    "an axis of any size": ("pp=9999999999999999999999", 2, (), "pp=9999999999999999999999 is too many"),
    "a million stages": ("pp=2,schedule=interleaved,virtual=1000000", 2, (), "virtual=1000000 is too many"),
    "stages by the product": ("pp=100000,schedule=interleaved,virtual=9", 2, (), "is 900,000 stages"),
    "ranks by the product": ("pp=100000,tp=100000", 2, (), "10,000,000,000 ranks: at most 100,000"),
    "single and an axis": ("single,tp=2", 2, (), "combines single with something else"),
    "threads and an axis": ("threads=2,tp=2", 4, (), "combines threads with something else"),
    "threads and remat": ("threads,remat=full", 2, (), "'threads,remat=full' combines threads"),
    "threads beside a word": ("tp,threads=2", 2, (), "combines threads with another layout"),
    "ep beyond the replicas": ("dp=2,ep=4", 2, (), "ep=4 does not divide 2 replicas"),
    "an unknown schedule": ("pp,schedule=1fb1", 2, (), "did you mean '1f1b'"),
    "a schedule without stages": ("ddp,schedule=gpipe", 2, (), "schedule=gpipe is an option of pp"),
    "stages a rank without stages": ("tp,virtual=2", 2, (), "virtual=2 is an option of pp"),
    "a ZeRO stage without shards": ("tp,zero=2", 2, (), "zero=2 is an option of dp_shard"),
    "offload without shards": ("ddp,offload=optimizer", 2, (), "offload=optimizer is an option of dp_shard"),
    "a type without shards": ("tp,params=bf16", 2, (), "params=bf16 is an option of dp_shard"),
    "sequence shards without tensors": ("dp=2,sequence=true", 2, (), "sequence=true is an option of tp"),
    "a ZeRO stage that is none": ("fsdp,zero=4", 2, (), "zero=4 is not valid"),
    "two ZeRO stages": ("zero1,zero=3", 2, (), "zero1 is ZeRO stage 1, which contradicts zero=3"),
    "a type for what is not gathered": ("zero2,params=bf16", 2, (), "only stage 3 gathers parameters"),
    "offload of what stays": ("zero1,offload=parameters", 2, (), "each rank keeps all parameters"),
    "neither true nor false": ("tp,sequence=yes", 2, (), "sequence=yes is not valid"),
    "a type that is none": ("fsdp,params=fp8", 2, (), "params=fp8 is not valid"),
    "offload to nowhere": ("fsdp,offload=disk", 2, (), "'disk' is not valid"),
    "no stages a rank": ("pp,virtual=0", 2, (), "virtual=0 is not a number"),
    "more stages a rank than 1f1b has": ("pp,virtual=2", 2, (), "'1f1b' has 1 stage on each rank, but 2 are requested"),
    "more stages a rank than a V has": ("pp,schedule=zbv,virtual=3", 2, (), "'zbv' has 2 stages on each rank"),
    "unknown remat": ("ddp,remat=half", 2, (), "remat=half is not a policy"),
    "remat of every none": ("ddp,remat=every", 2, (), "every needs a count of blocks"),
    "remat that says too much": ("ddp,remat=full:mm", 2, (), "full takes no option 'mm'"),
    "no such schedule file": ("pp,schedule=./none.txt", 2, (), "there is no schedule file ./none.txt"),
    "a schedule file not understood": ("pp,schedule=./bad.txt", 2, (), "./bad.txt:2:12"),
    "a schedule that waits for ever": ("pp,schedule=./dead.txt", 2, (), "ranks 0, 1 wait for each other"),
    "a schedule without a microbatch": ("pp,schedule=./gap.txt", 2, (), "no rank computes microbatch 1"),
    "half a schedule": ("pp,schedule=./half.txt", 2, (), "schedule 'half'"),
    "a schedule for other ranks": ("pp=2,schedule=./three.txt", 2, (), "is for 3 ranks, but this layout has pp=2"),
    "exact tp": ("tp", 2, ("--train.exact",), "exact mode with tp needs --train.tensor_shards"),
    "exact cp": ("cp", 2, ("--train.exact",), "exact mode with cp needs --train.sequence_shards"),
    "tensor shards without exact mode": ("tp", 2, ("--train.tensor_shards", "4"), "has an effect only in exact mode"),
    "three tensor shards": ("tp", 2, ("--train.exact", "--train.tensor_shards", "3"), "3 is not a power of two"),
    "fewer tensor shards than ranks": (
        "tp", 4, ("--train.exact", "--train.tensor_shards", "2"), "2 can't be divided by tp=4"),
    "exact tp with parts of sequences": (
        "tp=2,sequence=true", 2, ("--train.exact", "--train.tensor_shards", "2"), "sequence=true is not supported"),
    "three sequence shards": (
        "cp", 2, ("--train.exact", "--train.sequence_shards", "3"), "3 can't be divided by cp=2"),
    "shards of weights and of sequences": (
        "tp", 2, ("--train.exact", "--train.tensor_shards", "2", "--train.sequence_shards", "2"),
        "--train.sequence_shards 2 with --train.tensor_shards is not supported"),
    "exact ep": ("ep", 2, ("--train.exact",), "exact mode with ep is not supported"),
    "sync_bn tp": ("tp", 2, ("--train.buffers", "sync_bn"), "sync_bn with tp=2 is not supported"),
    "compiled tp": ("tp", 2, ("--train.compile",), "--train.compile with tp is not supported"),
    "units for nobody": ("ddp", 2, ("--place.units", "Block"), "--place.units sets which modules are gathered"),
    "stages for nobody": ("tp", 2, ("--place.stages", "2,2"), "--place.stages sets how many blocks"),
    "a tensor plan for nobody": ("pp", 2, ("--place.tensor_plan", "role.toml"), "--place.tensor_plan sets which weights"),
    "whole weights for nobody": ("fsdp", 2, ("--place.replicate", "head"), "--place.replicate sets which weights"),
    "blocks for nobody": ("ddp", 2, ("--place.blocks", "a,b"), "--place.blocks sets what is split"),
    "no such tensor plan": ("tp", 2, ("--place.tensor_plan", "none.toml"), "there is no tensor plan none.toml"),
}  # fmt: skip
_BOTH = "sequence={'0': 1, '1': 1}"
LATE: dict[str, tuple[str, str, tuple[str, ...], str]] = {
    "heads that do not divide": ("job_of(lambda: Tiny(heads=3))", "tp", (), "3 heads are not divisible by tp=2"),
    "heads that tensor shards do not divide": (
        "job_of()", "tp", ("--train.exact", "--train.tensor_shards=8"),
        "4 heads are not divisible by train.tensor_shards=8"),
    "tp on a CNN": ("job_of(Images)", "tp", (), "0 linear layers and 2 convolutions"),
    "tensor plan no TOML": ("job_of()", "tp", ("--place.tensor_plan=broken.toml",), "the tensor plan is not TOML"),
    "tensor plan unknown role": ("job_of()", "tp", ("--place.tensor_plan=role.toml",), "where: role.toml:3"),
    "tensor plan unknown key": ("job_of()", "tp", ("--place.tensor_plan=key.toml",), "unknown key 'head'"),
    "tensor plan unknown name": ("job_of()", "tp", ("--place.tensor_plan=name.toml",), "names 'blocks.*.q'"),
    "tensor plan of nothing": ("job_of()", "tp", ("--place.tensor_plan=empty.toml",), "names no module"),
    "tensor plan another table": ("job_of()", "tp", ("--place.tensor_plan=table.toml",), "did you mean 'roles'"),
    "tensor plan for tied weights": (
        "job_of(lambda: Tiny(tied=True))", "tp", ("--place.tensor_plan=tied.toml",), "one weight in two roles"),
    "tensor plan for integers": ("job_of(Quantised)", "tp", ("--place.tensor_plan=integers.toml",), "holds int8"),
    "tensor plan of other sizes": (
        "job_of()", "tp", ("--place.tensor_plan=sections.toml",), "but its role has [16, 8]"),
    "whole weights of no name": ("job_of()", "tp", ("--place.replicate=haed",), "did you mean 'head'"),
    "Muon under fsdp": ("job_of(optimizer=muon)", "fsdp", (), "Muon gives different values"),
    "Muon on split tensors": ("job_of(optimizer=muon)", "tp", (), "Muon needs whole matrices"),
    "Adafactor under fsdp": ("job_of(optimizer=adafactor)", "fsdp", (), "Adafactor gives different values"),
    "Adafactor on split tensors": ("job_of(optimizer=adafactor)", "tp", (), "Adafactor needs whole matrices"),
    "an optimizer that mixes parameters": (
        "job_of(optimizer=lambda n: Layerwise([p for _, p in n]))", "pp", (), "updates a parameter differently if it also updates a second parameter"),
    "an optimizer with a list of its own": (
        "job_of(optimizer=lambda n: Keeper([p for _, p in n]))", "zero1", (), "Keeper.mine holds parameters"),
    "groups by values": ("job_of(optimizer=peeking)", "zero2", (), "parameters without memory"),
    "a closure under fsdp": (
        "job_of(optimizer=lambda n: torch.optim.LBFGS([p for _, p in n]))", "fsdp", (), "needs a closure"),
    "memory out of order": ("job_of(Turned)", "fsdp", (), "its memory is not contiguous"),
    "two types in a unit": ("job_of(Mixed)", "fsdp", (), "layers.1.norm.weight (bfloat16)"),
    "no memory at all": ("job_of(Bare)", "fsdp", (), "parameters on the meta device"),
    "units of no class": ("job_of()", "fsdp", ("--place.units=Layer",), "has the class 'Layer'"),
    "units of no name": ("job_of()", "fsdp", ("--place.units=blocks.*",), "has the name 'blocks.*'"),
    "units by size and name": ("job_of()", "fsdp", ("--place.units=1000,Block",), "mixes a size and names"),
    "a ScriptModule": ("job_of(lambda: torch.jit.script(nn.Sequential(nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB))))", "fsdp", (), "inside a ScriptModule"),
    "a compiled model": ("job_of(lambda: torch.compile(Tiny()))", "pp", (), "that torch.compile has wrapped"),
    "more stages than blocks": (
        "job_of()", "pp=2,schedule=interleaved,virtual=4", (), "8 stages, but the model has only 4 blocks"),
    "a skip connection over a cut": ("job_of(Skip)", "pp", ("--place.cut=chain",), "a skip connection crosses the cut before layers.2"),
    "a branch on data": ("job_of(Branch)", "pp", (), "refused_layout_models.py:"),
    "a branch on data without a chain": ("job_of(Fork)", "pp", (), "the forward branches on a tensor's value"),
    "a draw of Python's": ("job_of(Luck)", "pp", (), "draws from random or numpy"),
    "cp along a graph": (f"job_of(Attributes, {_BOTH})", "pp=2,cp=2", (), "pp with cp needs a chain of blocks"),
    "more stages than calls": (
        "job_of(Attributes)", "pp,schedule=interleaved,virtual=9", (), "18 stages, but the forward calls only"),
    "blocks that run twice": ("job_of(Twice)", "pp", ("--place.cut=chain",), "the block layers.0 is called twice"),
    "a forward without its model": (
        "job_of(forward=lambda m, b: F.one_hot(b[0], VOCAB) * m.head.weight.sum())", "pp", (), "does not call the block"),
    "no repeated block": ("job_of(Attributes)", "pp", ("--place.cut=chain",), "no chain of blocks"),
    "stages that are too few": ("job_of()", "pp", ("--place.stages=1,1",), "2 stages with 2 blocks"),
    "stages that are too many": ("job_of()", "pp", ("--place.stages=2,1,1",), "3 stages with 4 blocks"),
    "blocks of no name": ("job_of()", "pp", ("--place.blocks=layers.0,layers.9",), "lists 'layers.9'"),
    "blocks in blocks": ("job_of()", "pp", ("--place.blocks=layers.0,layers.0.up",), "which contains it"),
    "a schedule for other microbatches": (
        "job_of()", "pp,schedule=./two.txt", ("--train.micro_batch_size=1",), "is for 2 microbatches"),
    "a microbatch beyond the batch": ("job_of()", "pp", ("--train.micro_batch_size=9",), "micro_batch_size 9"),
    "a generator": ("job_of(train_data=iter(rows()))", "pp", (), "train_data is a generator"),
    "exact and one weight by one name on two stages": (
        "job_of(ReadByName)", "pp", ("--train.exact",), "is used on the stages of ranks 0, 1 by one name"),
    "exact and a tied weight read elsewhere too": (
        "job_of(lambda: ReadByName(tied=True))", "pp", ("--train.exact",), "by a module that does not hold it"),
    "a whole batch over stages": ("job_of(loss=mean, loss_over='batch')", "pp", (), 'loss_over="batch" with pp'),
    "a whole batch on shards": ("job_of(loss=mean, loss_over='batch')", "fsdp", (), 'loss_over="batch" with fsdp'),
    "a whole batch in pieces": (
        "job_of(loss=mean, loss_over='batch')", "tp", ("--train.micro_batch_size=4",), "does not support accumulation"),
    "cp without a sequence": ("job_of()", "cp", (), "to do: sequence={'0': 1, '1': 1} in the job, or leave cp out"),
    "a sequence of no entry": ("job_of(sequence={'input_ids': 1})", "cp", (), "sequence={'input_ids': 1} does not match"),
    "a sequence of no dimension": ("job_of(sequence={'0': 3})", "cp", (), "sequence={'0': 3} does not match"),
    "a sequence too short": (f"job_of({_BOTH}, train_data=rows(1))", "cp", (), "a sequence of 1 over cp=2"),
    "cp on an LSTM": (f"job_of(Recurrent, {_BOTH})", "cp", (), "rnn (LSTM) can't be split"),
    "cp on BatchNorm": (f"job_of(lambda: Images(norm=True), {_BOTH})", "cp", (), "BatchNorm1d) can't be split"),
    "cp and a mean": (f"job_of({_BOTH}, loss=mean)", "cp", (), "the loss is one number"),
    "cp and neighbours": (f"job_of({_BOTH}, loss=neighbours)", "cp", (), "parts add up to"),
    "cp and a pooled output": (f"job_of(Pooled, {_BOTH}, loss=classed)", "cp", (), "the model's own forward"),
    "cp and attention by hand": (f"job_of(ByHand, {_BOTH})", "cp", (), "the first one that differs comes from the module head"),
    "cp on a sliding window": ("hugging('Mistral', sliding_window=4)", "cp", (), "sliding_window=4 is shorter"),
    "cp on an encoder-decoder": ("translation()", "cp", (), "has two sequences"),
    "ep without experts": ("job_of()", "ep", (), "Tiny has no experts to split"),
    "ep on a loop of experts": ("job_of(Loop)", "ep", (), "holds experts that are called one by one"),
    "ep and a capacity": ("job_of(Limited)", "ep", (), "with the experts of few spread over ranks, the model's outputs"),
    "remat without blocks": ("job_of(Attributes)", "ddp,remat=full", (), "Attributes has no repeated block"),
    "remat twice": ("job_of(Checkpointed)", "ddp,remat=full", (), "checkpoints its activations"),
    "remat of an unknown operation": ("job_of()", "ddp,remat=selective:mmm", (), "no operation 'mmm'"),
    "remat of what is overwritten": ("job_of(Written)", "ddp,remat=selective", (), "overwrites a result"),
    "tensor plan with two mistakes": (
        "job_of()", "tp", ("--place.tensor_plan=both.toml",), "2. the tensor plan names 'blocks.*.q'"),
}  # fmt: skip
_OFTEN = 3  # of so many in LATE one is in `make test`, all are in `make soak`


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a job, schedules and tensor plans."""
    found: Path = tmp_path_factory.mktemp("bad")
    _fill(found)
    return found


def _fill(folder: Path) -> None:
    for name, text in FILES.items():
        (folder / name).write_text(text)
    (folder / "job.py").write_text("def make_job():\n    raise AssertionError('a process was started')\n")


@pytest.mark.parametrize("name", EARLY)
def test_refused_before_a_process_starts(
    folder: Path, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(subprocess, "Popen", no_process)
    text = _early(folder, name, monkeypatch, capsys)
    assert not list(folder.glob("run*")), "a run folder was made"
    _one_screen(text, EARLY[name][3])
    _hints_are_legal(text, EARLY[name][1])


def _early(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    layout, ranks, words, _ = EARLY[name]
    return _refused(folder, layout, ranks, words, monkeypatch, capsys)


def _refused(
    folder: Path,
    layout: str,
    ranks: int,
    words: Iterable[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> str:
    from paceline.cli import main

    monkeypatch.chdir(folder)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    code = main(["train", "job.py", "--layout", layout, "--ranks", str(ranks), "--run-dir", "run", *words])
    text = capsys.readouterr().err.removeprefix("error: ")
    assert code == 2, text
    return text


def test_verify_refuses_what_rounds_at_every_use(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from paceline.cli import main

    monkeypatch.chdir(folder)
    layout = "dp_replicate=1,dp_shard=2,params=bf16"
    assert main(["verify", "job.py", "--layout", layout, "--ranks", "2", "--run-dir", "run"]) == 2
    text = capsys.readouterr().err.removeprefix("error: ")
    assert not list(folder.glob("run*")) and stands(text.splitlines()[0], patterns())
    _one_screen(text, "to do: --layout dp_replicate=1,dp_shard=2, which differs only by that rounding")


def _hints_are_legal(text: str, ranks: int) -> None:
    """What the line to type says of layouts."""
    for word in re.findall(r"--layout ([^\s·|]+)", text.rpartition("to do:")[2]):
        layout = parse_layout(word.strip(",;"))
        problems: list[Any] = []
        mesh = resolve_mesh(layout, ranks=layout.ranks or ranks, problems=problems)
        assert not [*problems, *refuse_schedule(layout, mesh)], word


def _sampled(names: Iterable[str]) -> list[Any]:
    """Imports of torch.compile and transformers take long."""
    slow = ("hugging", "translation", "torch.compile")
    return [
        pytest.param(
            name, marks=[pytest.mark.soak] if k % _OFTEN or any(word in LATE[name][0] for word in slow) else []
        )
        for k, name in enumerate(names)
    ]


@pytest.mark.parametrize("name", _sampled(LATE))
def test_refused_before_a_step(folder: Path, name: str) -> None:
    text = _late(folder, name)
    _one_screen(text, LATE[name][3])
    _hints_are_legal(text, 4)


def _late(folder: Path, name: str) -> str:
    code, text, words, _ = LATE[name]
    layout = parse_layout(text)
    asked = read_requested_settings(file=None, overrides=[word if "=" in word else f"{word}=true" for word in words])
    task = Task(
        verb="train",
        job="job.py",
        layout=text,
        ranks=layout.ranks or 2,
        settings=asked.values,
        origins=asked.origins,
    )
    told = try_pair(task, make=lambda: eval(code, vars(refused_layout_models)), folder=folder)
    assert told.state == "refused", told
    return told.text


def _rows(header: str) -> list[list[str]]:
    """Of the page's table that begins so."""
    text = (HERE.parent.parent / "docs" / "refusals.md").read_text()
    table = text.partition(f"{header}\n")[2].partition("\n\n")[0]
    return [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in table.splitlines()[1:]]


def test_the_page_gives_the_reasons_of_the_command(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = _rows("| Combination | Reason | Instead |")
    assert len(rows) >= 13
    for combination, reason, instead in rows:
        layout, *words = combination.strip("`").split()
        text = _refused(folder, layout, 4 if layout.startswith("dp=2,ep=2") else 2, words, monkeypatch, capsys)
        assert reason in text, f"{combination}: the page says {reason}, the command {text}"
        for word in re.findall(r"`([a-z][^`]*)`", instead):
            parse_layout(word)
    told = [expected for *_, expected in LATE.values()]
    late = _rows("| Combination | The refusal says | Instead |")
    assert late and all(says in told for _, says, _ in late), [says for _, says, _ in late if says not in told]


@pytest.mark.soak
def test_no_two_say_the_same(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    found = {name: _late(folder, name) for name in LATE}  # first: the others forbid processes from then on
    found |= {name: _early(folder, name, monkeypatch, capsys) for name in EARLY}
    seen: dict[str, str] = {}
    for name, text in found.items():
        first = text.strip().splitlines()[0]
        assert seen.setdefault(first, name) == name, f"{name} and {seen[first]} say the same: {first}"
    assert len(seen) >= 100


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=[] if name in ("Muon on split tensors", "a branch on data") else [pytest.mark.soak])
    for name in LATE
])  # fmt: skip
def test_the_command_says_the_same(shop: Shop, name: str) -> None:
    code, layout, words, expected = LATE[name]
    _fill(shop.path)
    shop.write("refused_layout_models.py", (HERE / "refused_layout_models.py").read_text())
    shop.write(
        "job.py",
        f"from refused_layout_models import *\nimport refused_layout_models\njob = eval({code!r}, vars(refused_layout_models))\n",
    )
    ranks = str(parse_layout(layout).ranks or 2)
    ended = shop.run("train", "job.py", "--layout", layout, "--ranks", ranks, "--run-dir", "run", *words, timeout=60)
    assert ended.code == 2, ended.text
    _one_screen(ended.err, expected)
    assert "step 1" not in ended.out


def _one_screen(text: str, expected: str) -> None:
    assert expected in text, text
    assert "Traceback" not in text and len(text.splitlines()) <= 25, text
    assert "to do:" in text, text
