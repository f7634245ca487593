"""A remote store: files below an fsspec URL, such as s3://bucket/prefix. Only this file uses fsspec, on first use.

Credentials come from the environment or from the configuration of fsspec. They never occur in an error.
"""

import errno
import hashlib
import os
import re
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from paceline.config.secret_settings import HIDDEN, holds_secret
from paceline.config.settings import Settings
from paceline.errors import MachineError, UsageError
from paceline.plugins import resolve

_SETTING = "checkpoint.remote"
_PACKAGES = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "abfs": "adlfs", "az": "adlfs"}
_READ_ONLY = ("http", "https", "data", "zip", "tar", "git", "github")
_S3 = ("s3", "s3a")
_BUCKETS = ("s3", "s3a", "gs", "gcs")  # their URLs begin with the name of a bucket
_WITH_FOLDERS = ("file", "local", "sftp", "ssh", "hdfs", "smb")
_PART_BYTES = 16 << 20  # of an upload or download in parts
_MAX_PARTS, _PARALLEL_PARTS = 10_000, 4
_BLOCK_BYTES = 8 << 20
_MAX_TEXT_BYTES = 1 << 29
_S3_CONFIG = {"connect_timeout": 10, "read_timeout": 60, "retries": {"total_max_attempts": 2, "mode": "standard"}}
# Words in the names of exceptions: each store has classes of its own.
_CREDENTIAL_ERRORS = re.compile(r"Credential|TokenRetrieval|SSOToken|UnauthorizedSSO|RefreshError|Forbidden")
_NETWORK_ERRORS = re.compile(r"Connect|Timeout|HTTPClientError|Incomplete|ServerError|ResponseParser|Proxy|SSL|Payload")
_BUSY_ERRNOS = (errno.EBUSY, getattr(errno, "EREMOTEIO", errno.EIO))  # those of the answers 500 and 503
_OWN_DISK_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
_MIN_SECRET_LENGTH = 6


class RemoteError(MachineError):
    """A remote store can't be read or written. `is_temporary` is True if the same call may succeed later."""

    def __init__(self, what: str, *, where: str = "", cause: str = "", hint: str = "", is_temporary: bool) -> None:
        super().__init__(what, where=where, cause=cause, hint=hint)
        self.is_temporary = is_temporary

    @property
    def start_error(self) -> UsageError | MachineError:
        """The error with which a run does not start: a wrong setting, or a server that can't be reached now."""
        kind = MachineError if self.is_temporary else UsageError
        return kind(self.what, where=self.where, cause=self.cause, hint=self.hint)


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
    protocol, separator, rest = url.partition("://")
    example = f"--{name} s3://bucket/folder"
    if not separator or "::" in url:
        is_path = url.startswith(("/", ".", "~"))
        hint = f"--{name} file://{Path(url).expanduser().absolute()}" if is_path else example
        raise UsageError(f"{name} {remove_secrets(url)} is not a URL.", hint=hint)
    is_path = protocol in ("file", "local")
    plain = unquote(rest)
    if "?" in plain or (not is_path and (set("@#;") & set(plain) or ":" in plain.partition("/")[0])):
        raise UsageError(
            f"{name} contains a user name, a password or a query.",
            cause="the URL is written to logs and to the run folder, where a secret could be read",
            hint=f"{example}, with the credentials in the environment (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY)",
        )
    if protocol == "memory":
        raise UsageError(f"{name} {url} is the memory of one process, which ends with it.", hint=example)
    if protocol in _READ_ONLY:
        raise UsageError(f"{name} {url} can't be written: {protocol} is only for reading.", hint=example)
    if protocol in ("file", "local") and not rest.startswith("/"):
        raise UsageError(f"{name} {url} is not an absolute path.", hint=f"--{name} file://{Path(rest).absolute()}")
    if protocol in _BUCKETS and not rest.strip("/"):
        raise UsageError(f"{name} {url} names no bucket.", hint=example)
    _check_packages(protocol, url=url, name=name)


def _check_packages(protocol: str, *, url: str, name: str) -> None:
    package = _PACKAGES.get(protocol)
    missing = [module for module in ("fsspec", package) if module is not None and find_spec(module) is None]
    if missing:
        hint = "pip install 'paceline[remote]'" if package in (None, "s3fs") else f"pip install fsspec {package}"
        raise UsageError(f"{name} {url} needs the package {missing[-1]}, which is not installed.", hint=hint)
    known = {*resolve("fsspec.registry:known_implementations"), *resolve("fsspec.registry:registry")}
    if protocol not in known:
        hint = "--checkpoint.remote s3://bucket/folder, gs://bucket/folder or file:///folder"
        raise UsageError(f"{name} {url}: fsspec knows no store {protocol}.", hint=hint)


def remove_secrets(text: str) -> str:
    """Return a message without the values of secrets in the environment, queries of URLs, and users in URLs."""
    text = re.sub(r"\?[^\s\"'<>]+", "", text)
    text = re.sub(r"//[^\s\"']+@", "//", text)
    text = re.sub(r"\b(\w[\w+.-]*:/?)[^\s\"']+@", r"\1", text)  # a URL that lacks a slash
    environment = {**os.environ, **_fsspec_options()}
    secret_names = [name for name in environment if holds_secret([name]) or name.endswith(("_KEY_ID", ".key"))]
    for value in sorted((environment[name] for name in secret_names), key=len, reverse=True):
        if len(value) >= _MIN_SECRET_LENGTH:
            text = text.replace(value, HIDDEN)
    return text


def _fsspec_options() -> dict[str, str]:
    """Return the options of fsspec's configuration by name, such as `s3.secret`; empty if it is not installed."""
    if find_spec("fsspec") is None:
        return {}
    options = resolve("fsspec.config:conf")
    return {
        f"{protocol}.{name}": value
        for protocol, values in options.items()
        if isinstance(values, Mapping)
        for name, value in values.items()
        if isinstance(value, str)
    }


class RemoteStore:
    """The files below one URL. Names are relative to it, with slashes. Every call may take long.

    Methods raise a `RemoteError` if the store can't be reached or used.
    """

    def __init__(self, url: str, *, filesystem: Any, root: str) -> None:
        self.url = url
        self._fs = filesystem
        self._root = root.rstrip("/")
        self._protocol = url.partition("://")[0]

    def check_access(self) -> None:
        """Write, read, list and remove a small file."""
        name, content = f".probe-{secrets.token_hex(6)}", b"paceline\n"
        self.write(name, content)
        with self._convert_errors("read"):
            is_same = self._fs.cat_file(self._path(name)) == content
        if not is_same or name not in self.list_files(""):
            raise self._error("read", "what was written is not there", is_temporary=False)
        self.remove([name])

    def list_files(self, folder: str) -> dict[str, int]:
        """Return the size of every file below a folder by its name in the folder; empty if there is no such folder."""
        top = self._path(folder)
        with self._convert_errors("listed"):
            try:
                found = self._fs.find(top, detail=True)
            except FileNotFoundError as error:
                if _is_missing_bucket(error):
                    raise
                return {}
        prefix = self._fs._strip_protocol(top).rstrip("/") + "/"
        return {
            path.removeprefix(prefix): int(info["size"])
            for path, info in found.items()
            if info["type"] == "file" and path.startswith(prefix)
        }

    def read(self, name: str) -> bytes | None:
        """Return the content of a small file; None if it does not exist, or is too large."""
        with self._convert_errors("read"):
            try:
                size = self._fs.info(self._path(name))["size"]
                return bytes(self._fs.cat_file(self._path(name))) if size <= _MAX_TEXT_BYTES else None
            except FileNotFoundError as error:
                if _is_missing_bucket(error):
                    raise
                return None

    def write(self, name: str, content: bytes) -> None:
        """Write a small file. On object stores a reader sees the old content or the new."""
        with self._convert_errors("written"):
            self._make_folder(name)
            self._fs.pipe_file(self._path(name), content)

    def remove(self, names: list[str]) -> None:
        """Remove files, in this order. Files that do not exist are ignored."""
        with self._convert_errors("emptied"):
            for name in names:
                try:
                    self._fs.rm_file(self._path(name))
                except FileNotFoundError as error:
                    if _is_missing_bucket(error):
                        raise

    def remove_empty_folder(self, name: str) -> None:
        """Remove a folder without files, on stores that have folders."""
        with self._convert_errors("emptied"), suppress(FileNotFoundError):
            if self._protocol in _WITH_FOLDERS:
                self._fs.rmdir(self._path(name))

    def upload(self, file: Path, name: str, *, on_bytes: Callable[[int], None]) -> None:
        """Upload a file. `on_bytes` is called with the size of each part that has arrived.

        Raises:
            FileNotFoundError: the file was removed.
        """
        size = file.stat().st_size
        with self._convert_errors("written", file):
            self._make_folder(name)
            options = self._part_options(size)
            self._fs.put_file(str(file), self._path(name), callback=_byte_counter(on_bytes), **options)

    def download(self, name: str, file: Path) -> None:
        """Download a file.

        Raises:
            FileNotFoundError: it does not exist in the store.
            OSError: the disk is full, or can't be written.
        """
        with self._convert_errors("read"):
            options = self._part_options(size=0)
            self._fs.get_file(self._path(name), str(file), **options)
        with file.open("rb+") as written:
            os.fsync(written.fileno())

    def is_copy(self, file: Path, name: str, *, only_by_checksum: bool = False) -> bool:
        """Return whether a file in the store has the bytes of a local file.

        On S3, the size and the checksum of the server (the ETag) are compared. If the server computes the ETag in
        another way, and on other stores, the file is read back, or counts as different if `only_by_checksum`.

        Raises:
            FileNotFoundError: the local file was removed.
        """
        size = file.stat().st_size
        with self._convert_errors("read", file):
            try:
                info = self._fs.info(self._path(name))
            except FileNotFoundError as error:
                if _is_missing_bucket(error):
                    raise
                return False
            if int(info["size"]) != size:
                return False
            if self._protocol in _S3 and str(info.get("ETag", "")).strip('"') == _etag(
                file, **self._part_options(size)
            ):
                return True
            return not only_by_checksum and self._has_equal_bytes(file, name)

    def _has_equal_bytes(self, file: Path, name: str) -> bool:
        with file.open("rb") as local, self._fs.open(self._path(name), "rb", block_size=_BLOCK_BYTES) as remote:
            while block := local.read(_BLOCK_BYTES):
                if remote.read(len(block)) != block:
                    return False
        return True

    def _part_options(self, size: int) -> dict[str, int]:
        """Return the options of an upload in parts; empty for a store that has none."""
        if self._protocol not in _S3:
            return {}
        return {"chunksize": max(_PART_BYTES, -(-size // _MAX_PARTS)), "max_concurrency": _PARALLEL_PARTS}

    def _make_folder(self, name: str) -> None:
        if self._protocol in _WITH_FOLDERS:
            self._fs.makedirs(self._path(name).rpartition("/")[0], exist_ok=True)

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    @contextmanager
    def _convert_errors(self, action: str, file: Path | None = None) -> Iterator[None]:
        """Convert an error of the store. An error about the local `file`, or about a full local disk, stays."""
        try:
            yield
        except RemoteError:
            raise
        except Exception as error:  # each store has exceptions of its own
            if isinstance(error, FileNotFoundError) and file is not None and not file.exists():
                raise
            if isinstance(error, FileNotFoundError) and action == "read" and not _is_missing_bucket(error):
                raise
            if isinstance(error, OSError) and error.errno in _OWN_DISK_ERRNOS and action == "read":
                raise
            converted = self._convert(action, error)
        else:
            return
        raise converted  # outside the handler, so that the store's error, which may contain secrets, is not its context

    def _convert(self, action: str, error: Exception) -> RemoteError:
        kind, code = type(error).__name__, _error_code(error)
        reason = remove_secrets(f"{code}: {error}" if code and code not in str(error) else str(error) or kind)
        reason = " ".join(reason.split())[:300].rstrip(".")
        if self._protocol in ("file", "local") and isinstance(error, OSError) and error.strerror:
            path = self._root
            return self._error(action, error.strerror, hint=f"ls -ld {path}, or another folder", is_temporary=False)
        if _is_missing_bucket(error):
            bucket = f"{self._protocol}://{self._root.partition('/')[0]}"
            hint = f"aws s3 mb {bucket}, or another bucket" if self._protocol in _S3 else "create it, or another bucket"
            return self._error(action, f"the bucket {bucket} does not exist", hint=hint, is_temporary=False)
        if isinstance(error, PermissionError) or _CREDENTIAL_ERRORS.search(kind):
            return self._error(
                action, reason, cause="missing, wrong or expired credentials, or a missing permission",
                hint=_CREDENTIAL_HINTS.get(self._protocol, "set the credentials of this store"), is_temporary=False,
            )  # fmt: skip
        is_busy = isinstance(error, OSError) and error.errno in _BUSY_ERRNOS
        if is_busy or isinstance(error, ConnectionError | TimeoutError) or _NETWORK_ERRORS.search(kind):
            return self._error(
                action, reason, cause="the server is away or overloaded, or its address is wrong",
                hint=f"check the network{_ENDPOINT_HINTS.get(self._protocol, '')}, then the same command",
                is_temporary=True,
            )  # fmt: skip
        return self._error(action, f"{kind}: {reason}", is_temporary=False)

    def _error(self, action: str, reason: str, *, cause: str = "", hint: str = "", is_temporary: bool) -> RemoteError:
        what = f"{self.url} can't be {action}: {reason}."
        return RemoteError(what, where=self.url, cause=cause, hint=hint, is_temporary=is_temporary)


_S3_HINT = (
    "aws configure, or set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY; the key needs the permissions "
    "s3:ListBucket, s3:GetObject, s3:PutObject and s3:DeleteObject"
)
_GS_HINT = "gcloud auth application-default login, or set GOOGLE_APPLICATION_CREDENTIALS"
_CREDENTIAL_HINTS = {"s3": _S3_HINT, "s3a": _S3_HINT, "gs": _GS_HINT, "gcs": _GS_HINT}
_ENDPOINT_HINTS = {"s3": " and AWS_ENDPOINT_URL", "s3a": " and AWS_ENDPOINT_URL"}


def open_remote_store(url: str) -> RemoteStore:
    """Return the store at a URL, without a connection yet.

    Raises:
        RemoteError: the store can't be opened.
    """
    protocol = url.partition("://")[0]
    options: dict[str, Any] = {"skip_instance_cache": True, "use_listings_cache": False}
    if protocol in _S3:
        configured = resolve("fsspec.config:conf").get("s3", {}).get("config_kwargs", {})
        options["config_kwargs"] = {**_S3_CONFIG, **configured}
    url = url.rstrip("/")
    store = RemoteStore(url, filesystem=None, root=url.partition("://")[2])
    with store._convert_errors("opened"):
        filesystem, root = resolve("fsspec.core:url_to_fs")(url, **options)
    return RemoteStore(url, filesystem=filesystem, root=root)


def _byte_counter(on_bytes: Callable[[int], None]) -> Any:
    """Return an fsspec callback that calls `on_bytes` with the growth of the number of transferred bytes."""
    counted = 0

    def count(size: int | None, value: int, **_: Any) -> None:
        nonlocal counted
        on_bytes(value - counted)
        counted = value

    return resolve("fsspec.callbacks:Callback")(hooks={"count": count})


def _etag(file: Path, *, chunksize: int, max_concurrency: int) -> str:
    """Return the ETag that S3 computes for a file: its MD5, or the MD5 of the MD5s of its parts and their number."""
    has_parts = file.stat().st_size >= 2 * chunksize  # s3fs uploads a smaller file in one part
    digests = []
    with file.open("rb") as source:
        while part := source.read(chunksize if has_parts else -1):
            digests.append(hashlib.md5(part, usedforsecurity=False))
    if has_parts:
        joined = b"".join(digest.digest() for digest in digests)
        return f"{hashlib.md5(joined, usedforsecurity=False).hexdigest()}-{len(digests)}"
    return digests[0].hexdigest() if digests else hashlib.md5(b"", usedforsecurity=False).hexdigest()


def _error_code(error: BaseException) -> str:
    """Return the code of an S3 error, such as NoSuchBucket; empty if the error has none."""
    response = getattr(error.__cause__, "response", None) or getattr(error, "response", None)
    code = response.get("Error", {}).get("Code") if isinstance(response, Mapping) else None
    return str(code) if code else ""


def _is_missing_bucket(error: BaseException) -> bool:
    return _error_code(error) == "NoSuchBucket" or "bucket does not exist" in str(error).lower()
