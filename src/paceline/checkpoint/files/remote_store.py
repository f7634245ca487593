"""A remote store: files below a URL, such as s3://bucket/prefix. Only this file uses obstore, on first use.

Credentials come from the environment, and on S3 also from the files of `aws configure`. They never occur in an error.
"""

import hashlib
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import unquote

from paceline.checkpoint.files.remote_errors import (
    STORE_KINDS,
    RemoteError,
    convert_store_error,
    missing_bucket,
    remove_secrets,
)
from paceline.config.settings import Settings
from paceline.errors import UsageError
from paceline.plugins import resolve

_SETTING = "checkpoint.remote"
_CLASSES = {"s3": "S3Store", "gs": "GCSStore", "az": "AzureStore", "file": "LocalStore"}
_POSSIBLE = "s3://bucket/folder, gs://bucket/folder, az://container/folder or file:///folder"
_PART_BYTES = 8 << 20  # of an upload or download in parts
_MAX_PARTS, _PARALLEL_PARTS = 10_000, 4
_MAX_TEXT_BYTES = 1 << 29
_CREDENTIAL_SECONDS = 300  # after which botocore is asked again, which renews those that expire
# A part takes at most `timeout`. A server that refuses connections is given up after about 2 s.
_CLIENT = {"allow_http": True, "connect_timeout": "5s", "timeout": "2min"}  # http: only if an address is set to one
_RETRIES = {
    "max_retries": 3,
    "retry_timeout": timedelta(seconds=30),
    "backoff": {"init_backoff": timedelta(seconds=0.2), "max_backoff": timedelta(seconds=5), "base": 2},
}


def remote_url(settings: Settings) -> str:
    """Return the URL of the setting `checkpoint.remote`; empty if it is not set, or `none`."""
    url = settings.checkpoint.remote
    return "" if url is None or url == "none" else url


def check_remote_setting(settings: Settings) -> None:
    """Check `checkpoint.remote`, if it is set, with `check_remote_url`.

    Raises:
        UsageError: it can't be used.
    """
    if url := remote_url(settings):
        check_remote_url(url)


def is_remote_url(text: str) -> bool:
    """Return whether a text is a URL and not a path."""
    return "://" in text


def check_remote_url(url: str, *, name: str = _SETTING) -> None:
    """Check a URL without a connection: its form, and that the packages that it needs are installed.

    Raises:
        UsageError: it can't be used. The message names the setting or option `name`.
    """
    scheme, separator, rest = url.partition("://")
    example = f"--{name} s3://bucket/folder"
    if not separator or "::" in url:
        is_path = url.startswith(("/", ".", "~"))
        hint = f"--{name} file://{Path(url).expanduser().absolute()}" if is_path else example
        raise UsageError(f"{name} {remove_secrets(url)} is not a URL.", hint=hint)
    plain = unquote(rest)
    if "?" in plain or (scheme != "file" and (set("@#;") & set(plain) or ":" in plain.partition("/")[0])):
        if scheme == "abfs":
            hint = f"--{name} az://container/folder, with the account in AZURE_STORAGE_ACCOUNT_NAME"
        else:
            hint = f"{example}, with the credentials in the environment (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY)"
        raise UsageError(
            f"{name} contains a user name, a password or a query.",
            cause="the URL is written to logs and to the run folder, where a secret could be read",
            hint=hint,
        )
    if scheme not in STORE_KINDS:
        raise UsageError(f"{name} {url}: there is no store of the kind {scheme}.", hint=f"--{name} {_POSSIBLE}")
    if scheme == "file" and not rest.startswith("/"):
        raise UsageError(f"{name} {url} is not an absolute path.", hint=f"--{name} file://{Path(rest).absolute()}")
    if not rest.strip("/"):
        raise UsageError(f"{name} {url} names no {'folder' if scheme == 'file' else 'bucket'}.", hint=example)
    if {"", ".", ".."} & set(rest.strip("/").split("/")):
        raise UsageError(f"{name} {url} has a folder without a name, or named '.' or '..'.", hint=example)
    if find_spec("obstore") is None:
        what = f"{name} {url} needs the package obstore, which is not installed."
        raise UsageError(what, hint="pip install 'paceline[s3]'")
    if STORE_KINDS[scheme] == "s3" and _needs_aws_files() and find_spec("botocore") is None:
        what = f"{name} {url} needs the package botocore, which reads what `aws configure` wrote."
        raise UsageError(what, hint="pip install 'paceline[aws]', or set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY")


class RemoteStore:
    """The files below one URL. Names are relative to it, with slashes. Every call may take long.

    Methods raise a `RemoteError` if the store can't be reached or used.
    """

    def __init__(self, url: str, *, store: Any) -> None:
        self.url = url
        self._store = store
        scheme, _, rest = url.partition("://")
        self._kind, self._root = STORE_KINDS[scheme], rest.partition("/")[2]

    def check_access(self) -> None:
        """Write, read, list and remove a small file."""
        name, content = f".probe-{secrets.token_hex(6)}", b"paceline\n"
        self.write(name, content)
        if self.read(name) != content or name not in self.list_files(""):
            what = f"{self.url} can't be used: what was written is not there."
            raise RemoteError(what, where=self.url, is_temporary=False)
        self.remove([name])

    def list_files(self, folder: str) -> dict[str, int]:
        """Return the size of every file below a folder by its name in the folder; empty if there is no such folder."""
        top = self._path(folder)
        with self._convert_errors("listed"):
            found = resolve("obstore:list")(self._store, top or None).collect()
        return {file["path"].removeprefix(f"{top}/"): file["size"] for file in found}

    def read(self, name: str) -> bytes | None:
        """Return the content of a small file; None if it does not exist, or is too large."""
        with suppress(FileNotFoundError), self._convert_errors("read"):
            found = self._call("get", name)
            return bytes(found.bytes()) if found.meta["size"] <= _MAX_TEXT_BYTES else None
        return None

    def write(self, name: str, content: bytes) -> None:
        """Write a small file. A reader sees the old content or the new."""
        with self._convert_errors("written"):
            self._call("put", name, content)

    def remove(self, names: list[str]) -> None:
        """Remove files, in this order. Files that do not exist are ignored."""
        for name in names:
            with suppress(FileNotFoundError), self._convert_errors("emptied"):
                self._call("delete", name)

    def remove_folder(self, name: str) -> None:
        """Remove what is left of a folder without files: on a disk itself, and parts of files, which are not listed."""
        if self._kind == "file":
            shutil.rmtree(f"/{self._path(name)}", ignore_errors=True)

    def upload(self, file: Path, name: str, *, on_bytes: Callable[[int], None]) -> None:
        """Upload a file. `on_bytes` is called with the size of each part that is sent.

        Raises:
            FileNotFoundError: the file was removed.
        """
        with file.open("rb") as source:
            options = {"chunk_size": _part_bytes(file.stat().st_size), "max_concurrency": _PARALLEL_PARTS}
            with self._convert_errors("written"):
                self._call("put", name, _CountingReader(source, on_bytes), **options)

    def download(self, name: str, file: Path) -> None:
        """Download a file.

        Raises:
            FileNotFoundError: it does not exist in the store.
            OSError: the disk is full, or can't be written.
        """
        with self._convert_errors("read"):
            size = self._call("head", name)["size"]
        with file.open("wb") as target:
            for part in self._read_parts(name, size):
                target.write(part)
            target.flush()
            os.fsync(target.fileno())

    def is_copy(self, file: Path, name: str, *, only_by_checksum: bool = False) -> bool:
        """Return whether a file in the store has the bytes of a local file.

        On S3, the size and the checksum of the server (the ETag) are compared. If the server computes the ETag in
        another way, and on other stores, the file is read back, or counts as different if `only_by_checksum`.

        Raises:
            FileNotFoundError: the local file was removed.
        """
        size, found = file.stat().st_size, None
        with suppress(FileNotFoundError), self._convert_errors("read"):
            found = self._call("head", name)
        if found is None or found["size"] != size:
            return False
        if self._kind == "s3" and str(found["e_tag"]).strip('"') == _etag(file):
            return True
        return not only_by_checksum and self._has_equal_bytes(file, name)

    def _has_equal_bytes(self, file: Path, name: str) -> bool:
        with file.open("rb") as local:
            return all(local.read(len(part)) == part for part in self._read_parts(name, file.stat().st_size))

    def _read_parts(self, name: str, size: int) -> Iterator[memoryview]:
        """Yield the bytes of a file in order. Several parts are fetched at a time."""
        for start in range(0, size, _PARALLEL_PARTS * _PART_BYTES):
            starts = range(start, min(size, start + _PARALLEL_PARTS * _PART_BYTES), _PART_BYTES)
            lengths = [min(_PART_BYTES, size - start) for start in starts]
            with self._convert_errors("read"):
                parts = self._call("get_ranges", name, starts=list(starts), lengths=lengths, coalesce=0)
            yield from (memoryview(part) for part in parts)

    def _call(self, function: str, name: str, *arguments: Any, **options: Any) -> Any:
        return resolve(f"obstore:{function}")(self._store, self._path(name), *arguments, **options)

    def _path(self, name: str) -> str:
        return "/".join(filter(None, (self._root, name)))

    @contextmanager
    def _convert_errors(self, action: str) -> Iterator[None]:
        """Convert an error of the store. That a file to be read or removed does not exist is not one."""
        try:
            yield
        except Exception as error:  # obstore raises errors of its own, ValueError and OSError
            is_missing_file = isinstance(error, FileNotFoundError) and not missing_bucket(str(error))
            if is_missing_file and action in ("read", "emptied"):
                raise
            converted = convert_store_error(self.url, action, str(error))
        else:
            return
        raise converted  # outside the handler, so that the store's error, which may contain secrets, is not its context


def open_remote_store(url: str) -> RemoteStore:
    """Return the store at a URL that `check_remote_url` has accepted, without a connection yet.

    Raises:
        RemoteError: the store can't be opened.
    """
    url = url.rstrip("/")
    scheme, _, rest = url.partition("://")
    kind, bucket = STORE_KINDS[scheme], rest.partition("/")[0]
    with RemoteStore(url, store=None)._convert_errors("opened"):
        make = resolve(f"obstore.store:{_CLASSES[kind]}")
        if kind == "file":
            return RemoteStore(url, store=make())
        options = _s3_options() if kind == "s3" else {}
        return RemoteStore(url, store=make(bucket, client_options=_CLIENT, retry_config=_RETRIES, **options))


def _needs_aws_files() -> bool:
    """Return whether the credentials for S3 are in the files that `aws configure` writes."""
    file = os.environ.get("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials")
    return "AWS_ACCESS_KEY_ID" not in os.environ and ("AWS_PROFILE" in os.environ or Path(file).expanduser().exists())


def _s3_options() -> dict[str, Any]:
    """Return options of an S3 store: the region and the credentials of `aws configure`, which obstore does not read."""
    options: dict[str, Any] = {"disable_bulk_delete": True}  # not all servers have it, and files are removed in order
    has_keys, has_region = "AWS_ACCESS_KEY_ID" in os.environ, {"AWS_REGION", "AWS_DEFAULT_REGION"} & set(os.environ)
    if (has_keys and has_region) or find_spec("botocore") is None:
        return options
    session = resolve("botocore.session:get_session")()
    if not has_region and (region := session.get_config_variable("region")):
        options["region"] = region
    if not has_keys and (credentials := session.get_credentials()):
        options["credential_provider"] = partial(_read_credentials, credentials)
    return options


def _read_credentials(credentials: Any) -> dict[str, Any]:
    """Return what botocore knows in the form that obstore wants."""
    found = credentials.get_frozen_credentials()
    until = datetime.now(UTC) + timedelta(seconds=_CREDENTIAL_SECONDS)
    keys = {"access_key_id": found.access_key, "secret_access_key": found.secret_key, "token": found.token}
    return {**keys, "expires_at": until}


class _CountingReader:
    """A file that reports how much of it was read."""

    def __init__(self, file: BinaryIO, on_bytes: Callable[[int], None]) -> None:
        self._file, self._on_bytes = file, on_bytes
        self.seek = file.seek  # from its result obstore knows the size

    def read(self, size: int = -1) -> bytes:
        content = self._file.read(size)
        self._on_bytes(len(content))
        return content


def _part_bytes(size: int) -> int:
    return max(_PART_BYTES, -(-size // _MAX_PARTS))


def _etag(file: Path) -> str:
    """Return the ETag that S3 computes for a file: its MD5, or the MD5 of the MD5s of its parts and their number."""
    size = file.stat().st_size
    part_bytes = _part_bytes(size)
    with file.open("rb") as source:
        parts = [
            hashlib.md5(source.read(part_bytes), usedforsecurity=False) for _ in range(0, max(size, 1), part_bytes)
        ]
    if size <= part_bytes:
        return parts[0].hexdigest()
    joined = b"".join(part.digest() for part in parts)
    return f"{hashlib.md5(joined, usedforsecurity=False).hexdigest()}-{len(parts)}"
