"""The Slurm on three network nodes that the tests of one file share."""

from collections.abc import Iterator

import pytest

from tests.conftest import SMALL_JOB
from tests.submit.slurm_cluster import SlurmCluster, slurm_cluster


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    folder = tmp_path_factory.mktemp("slurm")
    (folder / "job.py").write_text(SMALL_JOB)
    with slurm_cluster(3, folder) as made:
        yield made
