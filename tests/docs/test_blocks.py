"""Every code block of README and docs runs as written, page by page, in a folder of its own."""

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
WITHOUT_BLOCKS = {"settings.md"}
BLOCK = re.compile(
    r"(?:<!-- (?P<mark>not run|file|needs)(?:: (?P<word>[^>]*?))? -->\n)?```(?P<kind>\w+)\n(?P<body>.*?)```", re.S
)


@dataclass(frozen=True)
class Block:
    kind: str
    body: str
    mark: str
    word: str


def blocks(page: Path) -> list[Block]:
    found = []
    for match in BLOCK.finditer(page.read_text()):
        mark, word = match["mark"] or "", match["word"] or ""
        found.append(Block(kind=match["kind"], body=match["body"], mark=mark, word=word.strip()))
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_every_block_runs(page: Path, tmp_path: Path) -> None:
    ran = 0
    environ = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "NO_COLOR": "1"}
    environ["CUDA_VISIBLE_DEVICES"] = ""
    for block in blocks(page):
        if block.mark == "not run":
            assert block.word, f"{page.name}: say why a block is not run"
            continue
        if block.mark == "needs":
            probe = subprocess.run([sys.executable, "-c", f"import {block.word}"], capture_output=True, check=False)
            if probe.returncode:
                continue
        if block.mark == "file":
            (tmp_path / block.word).write_text(block.body)
            continue
        if block.kind == "python":
            command = [sys.executable, "-W", "ignore", "block.py"]
            (tmp_path / "block.py").write_text(block.body)
        elif block.kind in ("bash", "sh"):
            command = ["bash", "-euo", "pipefail", "-c", block.body]
        else:
            continue
        done = subprocess.run(
            command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=200, check=False
        )
        assert done.returncode == 0, f"{page.name}:\n{block.body}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        ran += 1
    assert ran or page.name in WITHOUT_BLOCKS, f"{page.name} has no block that runs"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_every_link_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name}: {target}"
