"""The checkpoints of one run in a remote store, in the format of those on disk.

    run.json  plan.json  skipped.jsonl      whose folder this is, and the records that a resume needs
    checkpoints/latest  best                the names of a step
    checkpoints/step-00000100/              the files of this checkpoint

A checkpoint is uploaded file by file, each compared with the local one, and then its manifest. `latest` names it only
after that. So a reader that starts at `latest` never gets a part of a checkpoint.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

from paceline.checkpoint.files.checkpoint_folder import BEST, LATEST, check_checkpoint, mark_best, parse_step
from paceline.checkpoint.files.manifest import MANIFEST, check_file_name, parse_file_entries, read_body
from paceline.checkpoint.files.manifest_schema import parse_files
from paceline.checkpoint.files.remote_errors import RemoteError
from paceline.checkpoint.files.remote_store import RemoteStore
from paceline.checkpoint.files.two_phase_commit import (
    commit_checkpoint,
    create_staging_folder,
    discard_staging_folder,
)
from paceline.errors import CheckpointError, SaveError
from paceline.filesystem.atomic_files import read_regular, write_text
from paceline.filesystem.disk_full import convert_to_save_error

CHECKPOINTS = "checkpoints"
_MAX_MANIFEST_BYTES = 1 << 29
_MAX_MARK_BYTES = 1 << 12


class RemoteFolder:
    """The remote checkpoints of one run. One process writes them at a time."""

    def __init__(self, store: RemoteStore) -> None:
        self.store = store

    def step_url(self, name: str) -> str:
        """Return the URL of a checkpoint, for messages."""
        return f"{self.store.url}/{CHECKPOINTS}/{name}"

    def upload(self, path: Path, *, on_bytes: Callable[[int], None]) -> int:
        """Upload a checkpoint and compare it with the local one; return the number of bytes that were sent.

        The result is 0 if the store has the checkpoint already, also if its manifest has to be replaced. A file that
        the store has is not sent again. Until the manifest, which comes last, has arrived, the checkpoint does not
        count.

        Raises:
            CheckpointError: the local checkpoint is damaged. Nothing is sent.
            FileNotFoundError: the local checkpoint was removed.
            RemoteError: the store can't be written, or has other bytes than those that were sent.
        """
        manifest = read_regular(path / MANIFEST, max_bytes=_MAX_MANIFEST_BYTES)
        stored = self._list_steps().get(path.name, {})
        remote_manifest = self.store.read(self._name(path.name, MANIFEST)) if MANIFEST in stored else None
        entries = read_body(path).files
        is_complete = remote_manifest is not None and parse_file_entries(remote_manifest) == entries
        is_complete &= all(stored.get(name) == entry["bytes"] for name, entry in entries.items())
        if is_complete and remote_manifest == manifest:
            return 0
        check_checkpoint(path)
        names = list(entries)
        missing = [] if is_complete else [name for name in names if not self._has_copy(path, name, stored)]
        if missing and remote_manifest is not None:  # a checkpoint of this name, which this one replaces
            self.store.remove([self._name(path.name, MANIFEST)])
        for name in missing:
            self.store.upload(path / name, self._name(path.name, name), on_bytes=on_bytes)
        for name in missing:
            if not self.store.is_copy(path / name, self._name(path.name, name)):
                raise self._damaged_error(path.name, name)
        self.store.remove([self._name(path.name, name) for name in stored if name not in (*names, MANIFEST)])
        self.store.write(self._name(path.name, MANIFEST), manifest)
        if self.store.read(self._name(path.name, MANIFEST)) != manifest:
            raise self._damaged_error(path.name, MANIFEST)
        if is_complete:  # only the outcome of an evaluation was added
            return 0
        return len(manifest) + sum((path / name).stat().st_size for name in missing)

    def mark(self, name: str, *, kind: str = LATEST) -> None:
        """Let `latest` or `best` name an uploaded checkpoint."""
        if self.read_mark(kind) != name:
            self.store.write(f"{CHECKPOINTS}/{kind}", f"{name}\n".encode())

    def read_mark(self, kind: str = LATEST) -> str:
        """Return the name of the checkpoint that `latest` or `best` names; empty if it names none."""
        content = (self.store.read(f"{CHECKPOINTS}/{kind}") or b"")[:_MAX_MARK_BYTES]
        name = content.decode(errors="replace").strip()
        return name if parse_step(Path(name)) >= 0 and "/" not in name else ""

    def prune(self, *, keep: int) -> None:
        """Remove all checkpoints up to the latest, except the newest `keep` and the best, and interrupted uploads.

        Later ones, from which the run was taken back to an older checkpoint, stay.
        """
        latest, best, steps = self.read_mark(), self.read_mark(BEST), self._list_steps()
        if latest not in steps:
            return
        older = [name for name in sorted(steps, key=_step) if _step(name) <= _step(latest)]
        complete = [name for name in older if MANIFEST in steps[name]]
        for name in older:
            if name not in (*complete[-keep:], latest, best):
                self._remove(name, steps[name])

    def list_candidates(self) -> list[str]:
        """Return the checkpoints to resume from, the newest first: the latest and those before it.

        If `latest` can't be read, all checkpoints with a manifest are candidates.
        """
        latest, steps = self.read_mark(), self._list_steps()
        names = [name for name in steps if MANIFEST in steps[name]]
        if latest:
            names = [*(name for name in names if _step(name) < _step(latest)), latest]
        return sorted(names, key=_step, reverse=True)

    def download_newest(self, folder: Path) -> tuple[Path | None, list[tuple[str, str]]]:
        """Download the newest intact checkpoint into `folder`, and the best one if it is another.

        Return the path of the newest, or None if there is none, and the URL and the reason of each that can't be used.

        Raises:
            RemoteError: the store can't be read.
            SaveError: the disk of `folder` has no space, or can't be written.
        """
        refused: list[tuple[str, str]] = []
        for name in self.list_candidates():
            path = self._try_download(name, folder, refused)
            if path is not None:
                self._download_best(folder, path, refused)
                return path, refused
        return None, refused

    def download(self, name: str, folder: Path) -> Path:
        """Download a checkpoint into `folder`, check all of its digests, and commit it as its latest. Return its path.

        Raises:
            CheckpointError: it is incomplete or damaged, or not there.
            RemoteError: the store can't be read.
            SaveError: the disk of `folder` has no space, or can't be written.
        """
        manifest = self.store.read(self._name(name, MANIFEST))
        if manifest is None:
            raise CheckpointError(f"{name} has no {MANIFEST}: it is not there completely.", where=self.step_url(name))
        stored = self._list_steps().get(name, {})
        staging = create_staging_folder(folder, step=_step(name), num_bytes=sum(stored.values()))
        try:
            with convert_to_save_error(f"{name} from {self.store.url}", folder):
                (staging / MANIFEST).write_bytes(manifest)
                self._download_files(name, staging, stored)
                check_checkpoint(staging)
                return commit_checkpoint(folder, staging, step=_step(name))
        except SaveError:
            raise
        except CheckpointError as error:
            raise CheckpointError(error.what.replace(staging.name, name), where=self.step_url(name)) from None
        except ValueError as error:
            what = f"the manifest of {name} can't be used: {error}."
            raise CheckpointError(what, where=self.step_url(name)) from None
        finally:
            discard_staging_folder(staging)

    def _try_download(self, name: str, folder: Path, refused: list[tuple[str, str]]) -> Path | None:
        try:
            return self.download(name, folder)
        except SaveError:
            raise
        except CheckpointError as error:
            refused.append((self.step_url(name), error.what))
            return None

    def _download_best(self, folder: Path, newest: Path, refused: list[tuple[str, str]]) -> None:
        name = self.read_mark(BEST)
        if not name:
            return
        best: Path | None = newest
        if name != newest.name:
            best = self._try_download(name, folder, refused)
            write_text(folder / LATEST, f"{newest.name}\n")
        if best is not None:
            mark_best(folder, best)

    def _download_files(self, name: str, staging: Path, stored: Mapping[str, int]) -> None:
        for file, (schema, _) in parse_files(read_body(staging).files).items():
            check_file_name(staging, file)
            if file not in stored:
                raise CheckpointError(f"{file} is missing from {name}.")
            if stored[file] != schema.bytes:
                raise CheckpointError(f"{file} has {stored[file]} bytes, but {schema.bytes} were written.")
            try:
                self.store.download(self._name(name, file), staging / file)
            except FileNotFoundError:
                raise CheckpointError(f"{file} is missing from {name}.") from None

    def _has_copy(self, path: Path, name: str, stored: Mapping[str, int]) -> bool:
        """Return whether an earlier upload has sent this file; False if only reading it back would tell."""
        return name in stored and self.store.is_copy(path / name, self._name(path.name, name), only_by_checksum=True)

    def _list_steps(self) -> dict[str, dict[str, int]]:
        """Return the sizes of the files of each checkpoint, by their names."""
        steps: dict[str, dict[str, int]] = {}
        for name, size in self.store.list_files(CHECKPOINTS).items():
            step, separator, file = name.partition("/")
            if separator and parse_step(Path(step)) >= 0:
                steps.setdefault(step, {})[file] = size
        return steps

    def _remove(self, name: str, files: Mapping[str, int]) -> None:
        """Remove a checkpoint, the manifest first, so that no reader takes the rest for a checkpoint."""
        names = sorted(files, key=lambda file: file != MANIFEST)
        self.store.remove([self._name(name, file) for file in names])
        self.store.remove_folder(f"{CHECKPOINTS}/{name}")

    def _damaged_error(self, step: str, file: str) -> RemoteError:
        url = self.step_url(step)
        return RemoteError(f"{url}/{file} has other bytes than those that were sent.", where=url, is_temporary=True)

    @staticmethod
    def _name(step: str, file: str) -> str:
        return f"{CHECKPOINTS}/{step}/{file}"


def _step(name: str) -> int:
    return parse_step(Path(name))
