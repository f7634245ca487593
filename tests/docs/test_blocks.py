"""Every code block of README and docs runs as written, page by page, in a folder of its own."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.page import PAGES, ROOT, Block, blocks, missing, unlike

LANGUAGES = {"python", "bash", "text", "toml"}
NEEDING = [page for page in PAGES if any(block.needs for block in blocks(page))]


def run_block(block: Block, *, folder: Path, name: str) -> str:
    """Run one block; what it printed."""
    environ = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "NO_COLOR": "1"}
    environ |= {"CUDA_VISIBLE_DEVICES": "", "COLUMNS": "120"}
    if block.kind == "python":
        command = [sys.executable, "-W", "ignore", "block.py"]
        (folder / "block.py").write_text(block.body)
    else:
        command = ["bash", "-euo", "pipefail", "-c", block.body]
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=200, check=False)
    wanted = int(block.marks.get("exit", 0))
    text = f"{name}:{block.line}:\n{block.body}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    assert done.returncode == wanted, f"exit code {done.returncode}, the page says {wanted}: {text}"
    return done.stdout + done.stderr


def run_page(page: Path, folder: Path, *, with_needs: bool) -> int:
    """Run the page from top to bottom; how many blocks ran."""
    ran, printed, is_fresh = 0, "", False
    (folder / "examples").symlink_to(ROOT / "examples")  # a page may run what a clone has
    for block in blocks(page):
        where = f"{page.name}:{block.line}"
        assert block.kind in LANGUAGES, f"{where}: a block of kind {block.kind!r}; write text, bash, python or toml"
        if "output" in block.marks:
            assert block.marks["output"] in ("", "with its numbers"), f"{where}: {block.marks['output']!r}?"
            numbers = bool(block.marks["output"])
            wrong = unlike(block.body, printed, numbers=numbers) if is_fresh else []
            assert not wrong, f"{where} shows what was not printed: {wrong}\nprinted:\n{printed}"
        elif "not run" in block.marks:
            assert block.marks["not run"], f"{where}: say why a block is not run"
            is_fresh = False
        elif "file" in block.marks:
            (folder / block.marks["file"]).write_text(block.body)
        elif block.kind in ("python", "bash"):
            is_fresh = with_needs or not block.needs
            if is_fresh:
                printed = run_block(block, folder=folder, name=page.name)
                ran += 1
    return ran


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_every_block_runs(page: Path, tmp_path: Path) -> None:
    own = ("cards.md", "matrix.md", "refusals.md", "training-checkers.md")
    has_own_test = page.name in own or page.stem.endswith("-details")
    ran = run_page(page, tmp_path, with_needs=False)
    assert ran or page in NEEDING or has_own_test, f"{page.name} has no block that runs"


@pytest.mark.parametrize("page", NEEDING, ids=lambda p: p.name)
def test_blocks_that_need_another_package_run(page: Path, tmp_path: Path) -> None:
    absent = missing(tuple(sorted({word for block in blocks(page) for word in block.needs})))
    if absent:
        pytest.skip(f"{page.name} needs {', '.join(absent)}, which is not installed: pip install {' '.join(absent)}")
    run_page(page, tmp_path, with_needs=True)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_every_link_leads_somewhere(page: Path) -> None:
    text = page.read_text()
    for target, anchor in re.findall(r"\]\(([^)#]*)(?:#([^)]*))?\)", text):
        if "://" in target:
            continue
        other = page.parent / target if target else page
        assert other.exists(), f"{page.name}: {target}"
        if anchor:
            heads = [
                re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-")
                for h in re.findall(r"^#+ (.*)$", other.read_text(), re.M)
            ]
            assert anchor in heads, f"{page.name}: {target} has no heading #{anchor}"
