"""The Dockerfile of the project: it is built without a network, on a small Debian, and its image trains.

Needs root, buildah and mmdebstrap, and wheels from the package index. It takes about six minutes.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = ROOT / "containers" / "Dockerfile"
HAS_TOOLS = os.geteuid() == 0 and all(map(shutil.which, ("buildah", "mmdebstrap")))
TORCH = "2.13.0"


def run(command: Sequence[str | Path], folder: Path) -> str:
    """The output of a command that must succeed; buildah keeps its images in `folder`."""
    environ = {**os.environ, "STORAGE_DRIVER": "vfs", "BUILDAH_ISOLATION": "chroot", "HOME": str(folder)}
    done = subprocess.run(list(map(str, command)), cwd=ROOT, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}: {done.stdout[-2000:]} {done.stderr[-2000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """The name of the built image, and the folder of the images."""
    folder = tmp_path_factory.mktemp("images")
    storage = ["--root", str(folder / "storage"), "--runroot", str(folder / "run")]
    wheels = folder / "wheels"
    run(
        [
            sys.executable,
            "-m",
            "pip",
            "download",
            "-q",
            "-d",
            wheels,
            f"torch=={TORCH}",
            ".[digits]",
            "setuptools>=77",
            "wheel",
        ],
        folder,
    )
    run(
        [
            "mmdebstrap",
            "--variant=minbase",
            "--include=python3,python3-venv,ca-certificates",
            "bookworm",
            folder / "base.tar",
        ],
        folder,
    )
    (folder / "Base").write_text("FROM scratch\nADD base.tar /\n")
    run(["buildah", *storage, "bud", "--layers=false", "-t", "localhost/base:1", "-f", folder / "Base", folder], folder)
    run(
        [
            "buildah", *storage, "bud", "--pull-never", "--layers=false", "--volume", f"{wheels}:/wheels", "-t", "localhost/train:1",
            "--build-arg", "BASE=localhost/base:1", "--build-arg", f"TORCH={TORCH}", "--build-arg", "EXTRAS=digits",
            "--build-arg", "PIP_OPTIONS=--no-index --find-links /wheels", "-f", DOCKERFILE, ROOT,
        ],
        folder,
    )  # fmt: skip
    yield "localhost/train:1", folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.soak
@pytest.mark.skipif(not HAS_TOOLS, reason="needs root, buildah and mmdebstrap")
def test_the_image_is_built_without_a_network_and_trains(image: tuple[str, Path]) -> None:
    name, folder = image
    storage = ["--root", str(folder / "storage"), "--runroot", str(folder / "run")]
    container = run(["buildah", *storage, "from", "--pull-never", name], folder).strip()

    def inside(line: str) -> str:
        return run(["buildah", *storage, "run", container, "--", "sh", "-c", line], folder)

    assert "nothing is wrong with this machine" in inside("paceline doctor")
    said = inside("paceline new digits && paceline train digits_cnn.py --ranks 2 --train.steps 4 --run-dir /work/run")
    assert "done at step 4" in said
    compiled = inside(
        "find /opt/paceline/lib -name '*.py' -path '*/torch/nn/modules/*' | wc -l; find /opt/paceline/lib -name '*.pyc' -path '*/torch/nn/modules/*' | wc -l"
    )
    sources, files = map(int, compiled.split())
    assert sources == files > 20


@pytest.mark.skipif(shutil.which("hadolint") is None, reason="hadolint is not installed")
def test_the_dockerfile_has_no_bad_habit() -> None:
    done = subprocess.run(["hadolint", str(DOCKERFILE)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
