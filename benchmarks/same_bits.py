"""Weights of this tree and of an earlier commit after the same runs, and the earlier commit's run folders in this tree.

    python benchmarks/same_bits.py 65c1205
    python benchmarks/same_bits.py 65c1205 --only ddp exact-text folders

The earlier commit is checked out beside this one. Each tree trains the same job files with its own command, on two
ranks where the case does not say otherwise. Printed for each case: the digest of the final weights in both trees, and
whether they are equal. `folders` is the last case: this tree resumes, evaluates, reports and verifies run folders that
the earlier commit wrote, and each resumed run must end with the weights of the earlier commit's uninterrupted run.
Exit code 4 if anything differs.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from two_commits import Tree, two_trees

STEPS, EXACT_STEPS, STOP = 20, 200, 12
SMALL = ["--job.width", "48", "--job.depth", "2"]
LAYOUTS = {
    "ddp": "text.py --layout ddp",
    "zero1": "text.py --layout zero1",
    "zero2": "text.py --layout zero2",
    "fsdp": "text.py --layout fsdp",
    "pp": "text.py --layout pp",
    "tp": "text.py --layout tp",
    "cp": "text.py --layout cp",
    "ep": "experts.py --layout ep",
    "pipedream": "text.py --layout pp --update pipedream",
    "local": "text.py --layout ddp --update local,every=8",
    "ps": "text.py --layout ddp --update ps,staleness=0",
    "tp x fsdp": "text.py --layout tp=2,dp_shard=2 --ranks 4",
}
EXACT = {"text": "text.py --layout ddp --train.exact", "digits": "digits_cnn.py --layout ddp --train.exact"}
MIXTURE = """
import torch
from torch import nn
import paceline as pl


class Experts(nn.Module):
    def __init__(self, count, width):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(count))

    def forward(self, tokens, expert_index, expert_weight):
        out = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            token, choice = torch.where(expert_index == number)
            out = out.index_add(0, token, expert(tokens[token]) * expert_weight[token, choice, None])
        return out


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.experts, self.head = nn.Linear(16, 5), Experts(5, 16), nn.Linear(16, 4)

    def forward(self, x):
        weight, index = self.gate(x).softmax(-1).topk(2)
        return self.head(x + self.experts(x, index, weight))


def make_job():
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(512, 16, generator=generator)
    rows = torch.utils.data.TensorDataset(features, torch.randint(0, 4, (512,), generator=generator))
    return pl.Job(
        model=Model, train_data=rows, eval_data=rows, global_batch_size=16,
        loss=lambda output, batch: nn.functional.cross_entropy(output, batch[1]),
        optimizer=lambda parameters: torch.optim.AdamW([p for _, p in parameters], lr=1e-2),
    )
"""


@dataclass(frozen=True)
class Shop:
    """A folder of job files and runs, and the command of one tree that works in it."""

    tree: Tree
    folder: Path

    def call(self, words: list[str], *, expected: int = 0) -> str:
        """Run `paceline WORDS`; exit with its output if the exit code is not the expected one."""
        command = [str(self.tree.python), "-m", "paceline", *words]
        ended = subprocess.run(command, cwd=self.folder, capture_output=True, text=True, timeout=900, check=False)
        if ended.returncode != expected:
            sys.exit(
                f"{self.tree.folder}: {' '.join(words)} ended with {ended.returncode}\n{ended.stdout}{ended.stderr}"
            )
        return ended.stdout

    def train(self, words: list[str], *, run: str, steps: int) -> str:
        """Train and return the digest of the final weights."""
        self.call(["train", *words, "--train.steps", str(steps), "--run-dir", run])
        return str(json.loads((self.folder / run / "weights.json").read_text())["digest"])


def arguments_of(case: str) -> list[str]:
    """Return the words of a case after `paceline train`."""
    words = case.split()
    return [*words, *(SMALL if words[0] == "text.py" else []), *([] if "--ranks" in words else ["--ranks", "2"])]


def compare_digests(name: str, case: str, *, old: Shop, new: Shop, steps: int) -> bool:
    """Train a case in both trees and print both digests, and the tensors that differ."""
    digests = [shop.train(arguments_of(case), run=f"runs/{name}", steps=steps) for shop in (old, new)]
    weights = [load_file(shop.folder / "runs" / name / "consolidated" / "model.safetensors") for shop in (old, new)]
    different = [key for key in weights[0] if not torch.equal(weights[0][key], weights[1][key])]
    verdict = "equal" if digests[0] == digests[1] else f"DIFFERENT in {', '.join(different)}"
    print(f"{name:<12} {steps:>3} steps   {digests[0][:16]} {digests[1][:16]}   {verdict}", flush=True)
    return digests[0] == digests[1]


def open_old_folders(name: str, case: str, *, old: Shop, new: Shop) -> bool:
    """Let the new tree resume a run of the old tree; evaluate, report and verify the old tree's whole run."""
    words = arguments_of(case)
    whole = old.train(words, run=f"whole/{name}", steps=STEPS)
    old.train([*words, "--checkpoint.every", str(STOP)], run=f"cut/{name}", steps=STOP)
    runs = {run: str(old.folder / run / name) for run in ("whole", "cut")}
    resumed = new.train(words, run=runs["cut"], steps=STEPS)
    for verb in (["evaluate", runs["whole"]], ["report", runs["whole"]], ["ckpt", "verify", runs["whole"]]):
        new.call(verb)
    print(f"{name:<12} folder of the old tree: resumed {resumed[:16]}, uninterrupted {whole[:16]}", flush=True)
    return resumed == whole


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", help="the earlier commit")
    names = [*LAYOUTS, *(f"exact-{name}" for name in EXACT), "folders"]
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, two_trees(asked.commit, Path(folder)) as trees:
        shops = [Shop(tree, Path(folder, f"{name}-work")) for name, tree in zip(("old", "new"), trees, strict=True)]
        for shop in shops:
            shop.folder.mkdir()
        (shops[0].folder / "experts.py").write_text(MIXTURE)
        for name in EXACT:  # the old tree's example, in both
            shops[0].call(["new", name])
        for file in shops[0].folder.glob("*.py"):
            (shops[1].folder / file.name).write_text(file.read_text())
        old, new = shops
        answers = [
            *(compare_digests(n, LAYOUTS[n], old=old, new=new, steps=STEPS) for n in LAYOUTS if n in asked.only),
            *(
                compare_digests(f"exact-{n}", EXACT[n], old=old, new=new, steps=EXACT_STEPS)
                for n in EXACT if f"exact-{n}" in asked.only
            ),
            *(open_old_folders(n, case, old=old, new=new) for n, case in LAYOUTS.items() if "folders" in asked.only),
        ]  # fmt: skip
    return 0 if all(answers) else 4


if __name__ == "__main__":
    sys.exit(main())
