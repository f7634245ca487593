"""The stores that a URL can name, and what is said when their servers refuse, fail or hang."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from paceline.checkpoint.files import remote_store
from paceline.checkpoint.files.remote_errors import RemoteError
from paceline.checkpoint.files.remote_folder import RemoteFolder
from paceline.checkpoint.files.remote_store import check_remote_url, open_remote_store
from paceline.checkpoint.files.safetensors_io import TensorBytes
from paceline.errors import CheckpointError, UsageError
from paceline.run_folder.run_folder import RunFolder
from paceline.trainer.saving.remote_start import _connect
from tests.checkpoint.test_damaged_checkpoints import STATE
from tests.checkpoint.test_remote_folder import write_step
from tests.checkpoint.write_checkpoint import save
from tests.trainer.saving.s3_server import SECRET, S3Server

pytest.importorskip("obstore")
pytest.importorskip("moto")
pytestmark = pytest.mark.one_worker  # which starts one server

_UPLOAD = """
import sys
from pathlib import Path
from paceline.checkpoint.files.remote_folder import RemoteFolder
from paceline.checkpoint.files.remote_store import open_remote_store

RemoteFolder(open_remote_store(sys.argv[1])).upload(Path(sys.argv[2]), on_bytes=lambda _: None)
"""
_KEY = "c2VjcmV0LWtleS1vZi10aGUtYWNjb3VudA=="


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    server = S3Server.start()
    server.write("bucket")
    yield server
    server.stop()


@pytest.fixture(autouse=True)
def only_these_credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, server: S3Server) -> None:
    """Hide what the machine has, and name the server of the tests."""
    for name in list(os.environ):
        if name.startswith(("AWS_", "GOOGLE_", "AZURE_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name, value in server.environ.items():
        monkeypatch.setenv(name, value)


@contextmanager
def answers(status: int, body: str) -> Iterator[str]:
    """A server that gives every request this answer, in place of a cloud; its address."""

    class Answer(BaseHTTPRequestHandler):
        def answer(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body.encode())

        do_PUT = do_GET = do_POST = answer

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Answer) as http:
        threading.Thread(target=http.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{http.server_port}"
        http.shutdown()


def refused(url: str) -> RemoteError:
    with pytest.raises(RemoteError) as caught:
        open_remote_store(url).check_access()
    text = str(caught.value)
    assert "Debug source" not in text and "RetryError" not in text and len(text.splitlines()[0]) < 400
    assert SECRET not in text and _KEY not in text and "AKIDEXAMPLE000" not in text
    return caught.value


def test_a_kill_in_a_large_upload_leaves_the_checkpoint_before(tmp_path: Path, server: S3Server) -> None:
    url = f"s3://bucket/{tmp_path.name}"
    remote = RemoteFolder(open_remote_store(url))
    remote.upload(write_step(tmp_path / "run", 10), on_bytes=lambda _: None)
    remote.mark("step-00000010")
    files = {
        f"{name}.safetensors": [
            TensorBytes(name=name, dtype="U8", shape=(25 << 20,), data=memoryview(os.urandom(25 << 20)))
        ]
        for name in ("a", "b")
    }
    path = save(tmp_path / "run", step=20, files=files, state=STATE)
    server.gate.hold_at("/b.safetensors?partNumber=3")
    process = subprocess.Popen([sys.executable, "-c", _UPLOAD, url, str(path)], start_new_session=True)
    server.gate.wait_until_held()
    os.killpg(process.pid, signal.SIGKILL)
    process.wait(30)
    server.gate.close()
    server.gate.open()
    names = [name for name in remote.store.list_files("checkpoints") if name.startswith("step-00000020")]
    assert names == ["step-00000020/a.safetensors"], "nothing half is listed"
    assert "<UploadId>" in urllib.request.urlopen(f"http://127.0.0.1:{server.port}/bucket?uploads").read().decode()
    found, refusals = remote.download_newest(tmp_path / "elsewhere")
    assert found is not None and found.name == "step-00000010" and not refusals
    sent: list[int] = []
    remote.upload(path, on_bytes=sent.append)
    assert sum(sent) == (path / "b.safetensors").stat().st_size, "the file that has arrived is not sent again"
    remote.mark(path.name)
    found, refusals = remote.download_newest(tmp_path / "third")
    assert found is not None and not refusals
    assert {f.name: f.read_bytes() for f in found.iterdir()} == {f.name: f.read_bytes() for f in path.iterdir()}


def test_a_few_answers_503_are_not_noticed_and_many_are_said_in_bounded_time(tmp_path: Path, server: S3Server) -> None:
    url = f"s3://bucket/{tmp_path.name}"
    server.gate.num_failures = 2
    open_remote_store(url).check_access()
    assert server.gate.num_failures == 0
    server.gate.num_failures = 1000
    begun = time.monotonic()
    try:
        error = refused(url)
    finally:
        server.gate.num_failures = 0
    assert error.is_temporary and time.monotonic() - begun < 20
    assert "503" in error.what and "overloaded" in str(error)
    open_remote_store(url).check_access()


def test_a_server_that_is_away_is_one_clear_line_in_bounded_time(server: S3Server) -> None:
    server.gate.close()
    begun = time.monotonic()
    try:
        error = refused("s3://bucket/a")
    finally:
        server.gate.open()
    assert error.is_temporary and time.monotonic() - begun < 20
    assert re.search(r"PUT http://127\.0\.0\.1:\d+/bucket/a/\.probe-\w+: Connection refused\.$", error.what)
    assert "AWS_ENDPOINT_URL" in error.hint


def test_a_server_that_hangs_is_given_up(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_store, "_CLIENT", {**remote_store._CLIENT, "timeout": "1s"})
    monkeypatch.setattr(remote_store, "_RETRIES", {**remote_store._RETRIES, "max_retries": 0})
    server.gate.hold_at("PUT /bucket/hung")
    try:
        error = refused("s3://bucket/hung")
    finally:
        server.gate.close()
        server.gate.open()
    assert error.is_temporary and "overloaded" in str(error)


@pytest.mark.parametrize(
    ("url", "status", "body", "told", "is_temporary"),
    [
        ("az://box/a", 403, "<Error><Code>AuthenticationFailed</Code><Message>No.\nId:1</Message></Error>",
         "AuthenticationFailed: No.\n  where: az://box/a\n  likely cause: missing, wrong or expired credentials", False),
        ("az://box/a", 404, "<Error><Code>ContainerNotFound</Code><Message>x</Message></Error>",
         "the container az://box does not exist", False),
        ("abfs://box/a", 503, "<Error><Code>ServerBusy</Code><Message>Busy</Message></Error>", "ServerBusy: Busy", True),
        ("gs://box/a", 401, "<Error><Code>AuthenticationRequired</Code><Message>No</Message></Error>",
         "gcloud auth application-default login", False),
        ("gs://box/a", 429, "", "429", True),
        ("s3://box/a", 301, "<Error><Code>PermanentRedirect</Code><Message>x</Message></Error>",
         "export AWS_REGION=REGION, the region of the bucket", False),
        ("s3://box/a", 400, "<Error><Code>AuthorizationHeaderMalformed</Code><Message>x</Message></Error>",
         "export AWS_REGION=REGION, the region of the bucket", False),
        ("s3://box/a", 400, "<Error><Code>RequestTimeout</Code><Message>x</Message></Error>", "RequestTimeout", True),
        ("s3://box/a", 403, f"<Error><Code>No</Code><Message>m</Message><Key>AKIDEXAMPLE000 {SECRET}</Key></Error>",
         "No: m", False),
        ("s3://box/a", 404, "no such page", "check the URL and AWS_ENDPOINT_URL", False),
    ],
)  # fmt: skip
def test_what_a_server_answers_is_said_with_what_to_do(
    url: str, status: int, body: str, told: str, is_temporary: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", _KEY)
    monkeypatch.setenv("GOOGLE_BEARER_TOKEN", "a-token-of-google")
    with answers(status, body) as address:
        for name in ("AWS_ENDPOINT_URL", "GOOGLE_BASE_URL", "AZURE_STORAGE_ENDPOINT"):
            monkeypatch.setenv(name, address)
        error = refused(url)
    assert told in str(error) and error.is_temporary == is_temporary


@pytest.mark.parametrize(
    ("url", "variables", "told"),
    [
        ("s3://box/a", {"AWS_METADATA_ENDPOINT": "http://127.0.0.1:9"}, "no credentials were found"),
        ("s3://box/a", {"AWS_ACCESS_KEY_ID": "AKIDEXAMPLE000"}, "Missing SecretAccessKey"),
        ("gs://box/a", {"GOOGLE_APPLICATION_CREDENTIALS": "/none.json"}, "/none.json"),
        ("gs://box/a", {"GOOGLE_SERVICE_ACCOUNT_KEY": f'{{"private_key": "{SECRET}"}}'}, "gcloud auth"),
        ("az://box/a", {}, "AZURE_STORAGE_ACCOUNT_NAME"),
        ("az://box/a", {"AZURE_STORAGE_ACCOUNT_NAME": "a", "AZURE_STORAGE_ACCOUNT_KEY": "no base64!"}, "az login"),
    ],
)
def test_credentials_that_are_missing_or_malformed_are_permanent_errors(
    url: str, variables: dict[str, str], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    error = refused(url)
    assert told in str(error) and not error.is_temporary and isinstance(error.start_error, UsageError)


@pytest.mark.parametrize("num_bytes", [0, 5 << 20, 7 << 20, 11 << 20, 41 << 20])
def test_the_checksum_of_the_server_is_that_of_the_file_also_in_parts(
    tmp_path: Path, server: S3Server, num_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_store, "_PART_BYTES", 5 << 20)  # the least that S3 accepts
    store = open_remote_store(f"s3://bucket/{tmp_path.name}")
    file, sent = tmp_path / "file", [0]
    file.write_bytes(os.urandom(num_bytes))
    store.upload(file, "file", on_bytes=lambda number: sent.append(number))
    assert sum(sent) == num_bytes
    with monkeypatch.context() as patch:
        patch.setattr(store, "_has_equal_bytes", lambda *_: pytest.fail("it is not read back"))
        assert store.is_copy(file, "file")
    store.download("file", tmp_path / "other")
    assert (tmp_path / "other").read_bytes() == file.read_bytes()
    content = server.read(f"bucket/{tmp_path.name}/file")
    server.write(f"bucket/{tmp_path.name}/file", content)
    assert store.is_copy(file, "file"), "another ETag, but the same bytes"
    server.write(f"bucket/{tmp_path.name}/file", content[:-1] + bytes([content[-1] ^ 1]) if content else b"x")
    assert not store.is_copy(file, "file")


def test_google_storage_is_used_as_its_interface_that_is_like_s3(
    tmp_path: Path, server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GOOGLE_BASE_URL", server.environ["AWS_ENDPOINT_URL"])
    monkeypatch.setenv("GOOGLE_BEARER_TOKEN", "a-token-of-google")
    remote = RemoteFolder(open_remote_store(f"gs://bucket/{tmp_path.name}"))
    remote.store.check_access()
    path = write_step(tmp_path / "run", 10)
    remote.upload(path, on_bytes=lambda _: None)
    remote.mark(path.name)
    large = tmp_path / "large"
    large.write_bytes(os.urandom(40 << 20))
    remote.store.upload(large, "large", on_bytes=lambda _: None)
    assert remote.store.is_copy(large, "large") and not remote.store.is_copy(large, "large", only_by_checksum=True)
    found, refusals = remote.download_newest(tmp_path / "other")
    assert found is not None and found.name == path.name and not refusals
    remote.store.remove(["large", "none"])
    assert "large" not in remote.store.list_files("")
    assert "the bucket gs://nobucket does not exist" in str(refused("gs://nobucket/a"))
    with pytest.raises(RemoteError, match="gs://nobucket does not exist"):  # not: there is no such file
        open_remote_store("gs://nobucket/a").read("run.json")


def test_what_aws_configure_wrote_is_used(tmp_path: Path, server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:9")
    folder = tmp_path / "home" / ".aws"
    folder.mkdir(parents=True)
    (folder / "credentials").write_text(f"[work]\naws_access_key_id=AKIDEXAMPLE000\naws_secret_access_key={SECRET}\n")
    (folder / "config").write_text("[profile work]\nregion=eu-west-1\n")
    assert "no credentials were found" in str(refused(f"s3://bucket/{tmp_path.name}")), "of the profile `default`"
    monkeypatch.setenv("AWS_PROFILE", "work")
    store = open_remote_store(f"s3://bucket/{tmp_path.name}")
    store.check_access()
    assert store._store.config["region"] == "eu-west-1"
    server.check_credentials(True)
    try:
        assert "InvalidAccessKeyId" in str(refused(f"s3://bucket/{tmp_path.name}"))
    finally:
        server.check_credentials(False)
    find_spec = remote_store.find_spec
    monkeypatch.setattr(remote_store, "find_spec", lambda name: None if name == "botocore" else find_spec(name))
    with pytest.raises(UsageError, match="needs the package botocore"):
        check_remote_url("s3://bucket/a")


def test_a_folder_is_not_made_by_a_look_and_goes_with_the_parts_of_a_killed_upload(tmp_path: Path) -> None:
    folder = tmp_path / "store" / "run #1 ü%20"
    remote = RemoteFolder(open_remote_store(f"file://{folder}"))
    assert remote.list_candidates() == [] and not folder.exists()
    for step in (10, 20):
        remote.upload(write_step(tmp_path / "run", step), on_bytes=lambda _: None)
    remote.mark("step-00000020")
    (folder / "checkpoints" / "step-00000010" / "c.safetensors#1").write_bytes(b"half")
    assert "checkpoints/step-00000010/c.safetensors#1" not in remote.store.list_files("")
    remote.prune(keep=1)
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["latest", "step-00000020"]


def test_a_secret_in_the_url_of_resume_is_refused_even_if_it_is_not_needed(tmp_path: Path) -> None:
    write_step(tmp_path / "run" / "checkpoints", 10)
    with pytest.raises(UsageError) as refused:
        _connect("", "s3://user:topsecret@bucket/run", run=RunFolder(tmp_path / "run"), is_restart=False)
    assert "topsecret" not in str(refused.value)


def test_if_all_are_damaged_the_run_does_not_begin_at_its_first_step(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    run.path.mkdir()
    connection = _connect(f"file://{tmp_path}/store", "", run=run, is_restart=False)
    assert connection.source is None, "a new run"
    assert connection.target is not None
    connection.target.upload(write_step(tmp_path / "other", 4), on_bytes=lambda _: None)
    (file,) = (tmp_path / "store").rglob("b.safetensors")
    file.write_bytes(b"")
    with pytest.raises(CheckpointError, match="none of the 1 checkpoints can be used"):
        _connect(f"file://{tmp_path}/store", "", run=run, is_restart=False).download(tmp_path / "run" / "checkpoints")
