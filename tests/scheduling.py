"""Which tests share a worker, and which run alone.

A file whose `pytestmark` is `pytest.mark.one_worker` has fixtures that are expensive or compares its cases with each
other: all of its tests run in the same worker, so that each of its module fixtures is made once. pytest-xdist 3.8 has a
mark for this (`xdist_group`), but pytest 9.2 no longer reads the attribute that xdist writes the group to, so the tests
of such a file were spread over all workers without a word.
"""

from functools import cache
from pathlib import Path

from xdist.scheduler import LoadScopeScheduling

MARK = "pytest.mark.one_worker"


@cache
def is_for_one_worker(file: Path) -> bool:
    """Return whether the tests of this file run in one worker."""
    return MARK in file.read_text()


class FileScheduling(LoadScopeScheduling):
    """Gives a marked file to one worker, and each test of every other file to whichever worker is free."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return file if is_for_one_worker(Path(self.config.rootpath) / file) else str(nodeid)
