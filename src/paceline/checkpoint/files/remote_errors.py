"""The errors of remote stores: what obstore and the servers say, in a few words, and what to do about it."""

import os
import re
from functools import partial

from paceline.config.secret_settings import HIDDEN, holds_secret
from paceline.errors import MachineError, UsageError

STORE_KINDS = {"s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs", "az": "az", "abfs": "az", "file": "file"}
"""The kind of a store by the scheme of its URL."""
_HINTS = {  # what to do about credentials, and where the address of the server may be set
    "s3": (
        "aws configure, or set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY; the key needs the permissions "
        "s3:ListBucket, s3:GetObject, s3:PutObject and s3:DeleteObject",
        "AWS_ENDPOINT_URL",
    ),
    "gs": (
        "gcloud auth application-default login, or set GOOGLE_APPLICATION_CREDENTIALS to the file of a key",
        "GOOGLE_BASE_URL",
    ),
    "az": (
        "set AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY; or az login and AZURE_USE_AZURE_CLI=true",
        "AZURE_STORAGE_ACCOUNT_NAME",
    ),
}
_SECRET_VARIABLE = re.compile(r"_KEY(_ID|_BASE64)?$")
_MIN_SECRET_LENGTH = 6
# How obstore words an error: a text for people with the server's answer, then a dump of the error's structure.
_REQUEST = re.compile(r"Error performing ([A-Z]+ \S+) in ")
_STATUS = re.compile(r"status code: (\d{3})")
_CODE, _MESSAGE = re.compile(r"<Code>(.*?)</Code>"), re.compile(r"<Message>(.*?)(?:\n|</Message>)")
_OS_ERROR = re.compile(r"\(os error (\d+)\)")
_SYSTEM_MESSAGE = re.compile(r'(?:message|error): "([^"]+)"')
_METADATA = re.compile(r"//169\.254\.|//metadata\.google|/latest/api/token")  # has the credentials of a machine
_REGION_CODES = ("PermanentRedirect", "AuthorizationHeaderMalformed")


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


def remove_secrets(text: str) -> str:
    """Return a message without the values of secrets in the environment, queries of URLs, and users in URLs."""
    text = re.sub(r"\?[^\s\"'<>]+", "", text)
    text = re.sub(r"//[^\s\"']+@", "//", text)
    text = re.sub(r"\b(\w[\w+.-]*:/?)[^\s\"']+@", r"\1", text)  # a URL that lacks a slash
    names = [name for name in os.environ if holds_secret([name]) or _SECRET_VARIABLE.search(name)]
    for value in sorted((os.environ[name] for name in names), key=len, reverse=True):
        if len(value) >= _MIN_SECRET_LENGTH:
            text = text.replace(value, HIDDEN)
    return text


def convert_store_error(url: str, action: str, text: str) -> RemoteError:
    """Return the error that says why the store at a URL can't be `action`; `text` is how obstore says it."""
    kind, rest = STORE_KINDS[url.partition("://")[0]], url.partition("://")[2]
    error = partial(_error, url, action)
    if kind == "file":
        number = _OS_ERROR.search(text)
        return error(os.strerror(int(number[1])) if number else _plain(text), hint=f"ls -ld {rest}, or another folder")
    if place := missing_bucket(text):
        bucket = f"{url.partition('://')[0]}://{rest.partition('/')[0]}"
        hint = f"aws s3 mb {bucket}, or another bucket" if kind == "s3" else f"create it, or another {place}"
        return error(f"the {place} {bucket} does not exist", hint=hint)
    credential_hint, address = _HINTS[kind]
    request, status, code = _parse_answer(text)
    if kind == "s3" and (code in _REGION_CODES or "Received redirect" in text):
        hint = "export AWS_REGION=REGION, the region of the bucket, then the same command"
        return error(_plain(text), cause="the bucket is in another region", hint=hint)
    is_wrong_token = "token request" in text and 400 <= status < 500
    if action == "opened" or _METADATA.search(request) or status in (401, 403) or is_wrong_token:
        reason = "no credentials were found" if _METADATA.search(request) else _plain(text)
        cause = "missing, wrong or expired credentials, or a missing permission"
        return error(reason, cause=cause, hint=credential_hint)
    if status >= 500 or status in (408, 429) or code == "RequestTimeout" or "HTTP error" in text:
        cause = "the server is away or overloaded, or its address is wrong"
        hint = f"check the network and {address}, then the same command"
        return error(_plain(text), cause=cause, hint=hint, is_temporary=True)
    return error(_plain(text), hint=f"check the URL and {address}")


def _error(
    url: str, action: str, reason: str, *, cause: str = "", hint: str = "", is_temporary: bool = False
) -> RemoteError:
    what = f"{url} can't be {action}: {reason}."
    return RemoteError(what, where=url, cause=cause, hint=hint, is_temporary=is_temporary)


def missing_bucket(text: str) -> str:
    """Return how the store calls the bucket that an error says is missing; empty if it says something else."""
    code = _parse_answer(text)[2]
    return {"NoSuchBucket": "bucket", "ContainerNotFound": "container"}.get(code, "")


def _parse_answer(text: str) -> tuple[str, int, str]:
    """Return the request that failed, the status of the answer, 0 without one, and its code, such as NoSuchKey."""
    request, status, code = _REQUEST.search(text), _STATUS.search(text), _CODE.search(text)
    return request[1] if request else "", int(status[1]) if status else 0, code[1] if code else ""


def _plain(text: str) -> str:
    """Return an error of obstore in a few words, without secrets: the dump of its structure is not for people."""
    text, _, dump = text.partition("\n\nDebug source:")
    text = re.sub(r"^Generic \w+ error: ", "", text)
    request, _, code = _parse_answer(text)
    message, system = _MESSAGE.search(text), _SYSTEM_MESSAGE.search(dump)
    if code:
        text = f"{code}: {message[1]}" if message else code
    elif request:
        outcome = text.rpartition(" - ")[2]
        text = f"{request}: {system[1] if system and 'HTTP error' in outcome else outcome}"
    return " ".join(remove_secrets(text).split())[:300].rstrip(".: ")
