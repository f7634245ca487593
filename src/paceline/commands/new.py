"""The `new` verb: writes an example job."""

from importlib.resources import files
from pathlib import Path

from paceline.commands.command_table import NewOptions, VerbOutput
from paceline.console.formatting import did_you_mean
from paceline.errors import UsageError

EXAMPLES = {"text": "text.py", "digits": "digits_cnn.py", "hf": "hf_llama.py"}


def new(name: str, *, folder: Path | None = None) -> Path:
    """Write an example job into `folder`; never overwrite a file.

    Raises:
        UsageError: there is no such example, or the file exists or can't be written.
    """
    if name not in EXAMPLES:
        raise UsageError(
            f"there is no example {name!r}.",
            cause=did_you_mean(name, EXAMPLES),
            hint=f"paceline new {' | '.join(EXAMPLES)}",
        )
    target = (folder or Path()) / EXAMPLES[name]
    text = files("paceline").joinpath("examples").joinpath(EXAMPLES[name]).read_text(encoding="utf-8")
    try:
        with target.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise UsageError(
            f"{target} exists and is not overwritten.", hint=f"rm {target}, or use another folder"
        ) from None
    except OSError as error:
        raise UsageError(f"{target} can't be written: {error.strerror}.", hint="cd to a writable folder") from None
    return target


def run_verb(options: NewOptions, _: list[str]) -> VerbOutput:
    """Run the verb; return the exit code, the value for `--json`, and the text."""
    path = new(options.name)
    text = f"wrote {path}\nnext:\n  paceline train {path} --ranks 2\n  paceline verify {path} --layout ddp --ranks 2"
    return 0, {"path": str(path)}, text
