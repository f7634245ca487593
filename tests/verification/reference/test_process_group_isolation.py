"""The user's code in the reference sees a world of one rank, and everything is restored afterwards."""

import os
from pathlib import Path

import pytest
import torch.distributed as dist

from paceline.verification.reference.process_group_isolation import single_process


def test_a_world_of_one_for_a_while(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.delenv("SLURM_NTASKS", raising=False)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        with pytest.raises(ValueError), single_process(), single_process():
            assert not dist.is_initialized()
            assert os.environ["WORLD_SIZE"] == "1"
            assert "SLURM_NTASKS" not in os.environ
            raise ValueError
        assert dist.is_initialized() and dist.get_world_size() == 1
        assert os.environ["WORLD_SIZE"] == "4"
    finally:
        dist.destroy_process_group()
