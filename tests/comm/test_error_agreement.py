"""Ranks agree on a common error, whoever started them."""

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

SCRIPT = """
import os
from paceline.comm.timed_barrier import all_ranks_arrive
from paceline.comm.process_group import LaunchInfo, World
world = World.join(launch_info=LaunchInfo.read(os.environ), device_type="cpu", backend="gloo", timeout_seconds=60)
alone = world.rank == 0 and all_ranks_arrive(world, "what the first has met alone", seconds=1.0)
found = [all_ranks_arrive(world, "both"), alone, all_ranks_arrive(world, "both")]
world.barrier()
open(f"rank-{world.rank}", "w").write(str(found))
world.close()
"""


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def of_torchrun(script: Path) -> list[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    return [subprocess.Popen(command, cwd=script.parent)]


def of_the_environment(script: Path) -> list[subprocess.Popen[bytes]]:
    """As srun and mpirun leave it to torch: rank 0 keeps the store."""
    named = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    every = [os.environ | named | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]
    return [subprocess.Popen([sys.executable, str(script)], env=environ, cwd=script.parent) for environ in every]


@pytest.mark.parametrize("starts", [of_torchrun, of_the_environment])
def test_what_all_ranks_have_met_is_known_under_any_launcher(
    starts: Callable[[Path], list[subprocess.Popen[bytes]]], tmp_path: Path
) -> None:
    script = tmp_path / "meets.py"
    script.write_text(SCRIPT)
    assert [one.wait(timeout=90) for one in starts(script)] in ([0], [0, 0])
    assert [(tmp_path / f"rank-{rank}").read_text() for rank in (0, 1)] == ["[True, False, True]"] * 2
