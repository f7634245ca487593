"""Which files of its folder a job imports, by a look at its text."""

from pathlib import Path

from paceline.nodes.machine_facts import imported_files, read_machine_facts

FILES = {
    "job.py": "import helper, os\nfrom lib import losses\nfrom lib.models.small import Net\n",
    "helper.py": "def f():\n    import late\n",
    "late.py": "import helper\nimport job\n",
    "unused.py": "",
    "lib/__init__.py": "",
    "lib/losses.py": "from . import shared\nfrom .models import big\n",
    "lib/shared.py": "x = (",
    "lib/models/__init__.py": "",
    "lib/models/small.py": "from ..util import x\n",
    "lib/models/big.py": "",
    "lib/util.py": "from ... import outside\n",
    "lib/unused.py": "",
}


def test_imports_are_followed_within_the_folder_of_the_job(tmp_path: Path) -> None:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    names = [name for name, _ in imported_files(tmp_path / "job.py")]
    assert names == sorted(set(FILES) - {"job.py", "unused.py", "lib/unused.py"})
    facts = read_machine_facts(
        head_host="127.0.0.1", run_folder=tmp_path, code={"job.py": tmp_path / "job.py"}, data={}
    )
    assert sorted(facts.imported) == names and facts.imported["helper.py"] != facts.imported["late.py"]


def test_a_job_that_is_not_there_imports_nothing(tmp_path: Path) -> None:
    assert imported_files(tmp_path / "job.py") == []
