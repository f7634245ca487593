"""Two ranks of plain ddp: rank 0 notes which of our files are entered by steps 3 to 5, by the fetches of their batches, and by a save.

`test_one_step.py` and `counts.py` run this file.
"""

import json
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import paceline as pl

PACKAGE = str(Path(pl.__file__).parent)
FIRST, LAST = 3, 5


def make_job() -> pl.Job:
    x = torch.randn(256, 8, generator=torch.Generator().manual_seed(0))
    return pl.Job(
        model=lambda: nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 2)),
        loss=lambda output, batch: (F.cross_entropy(output, batch[1], reduction="sum"), len(batch[1])),
        train_data=TensorDataset(x, (x.sum(1) > 0).long()),
        optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.2),
        global_batch_size=16,
    )


def main(folder: str) -> None:
    entered: dict[str, set[str]] = {"step": set(), "fetch": set(), "save": set()}

    def profile(part: str) -> None:
        def note(frame: FrameType, event: str, _: Any) -> None:
            name = frame.f_code.co_filename
            if event == "call" and name.startswith(PACKAGE):
                entered[part].add(name.removeprefix(PACKAGE + "/"))

        sys.setprofile(note)

    settings = {"train.steps": 8, "log.every": 100, "checkpoint.every": 100, "train.check_every": 0}
    with pl.Run(make_job(), ranks=2, device="cpu", run_dir=f"{folder}/run", settings=settings) as run:
        for number, batch in enumerate(run.batches(), start=1):
            sys.setprofile(None)
            if FIRST <= number <= LAST:
                profile("step")
            run.step(batch)
            if FIRST <= number <= LAST:
                profile("fetch")
            if number == LAST + 2:
                profile("save")
                run.save()
                sys.setprofile(None)
        if run.rank == 0:
            found = {part: sorted(names) for part, names in entered.items()}
            (Path(folder) / "entered.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
