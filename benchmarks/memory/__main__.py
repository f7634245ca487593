"""The command: the whole list, a part of it, or one setting."""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from benchmarks.memory.measured import Failed, Setting, measure
from benchmarks.memory.settings import settings

from paceline.errors import PacelineError


def main(words: Sequence[str] | None = None) -> int:
    """Measure, and write a line of JSON for each rank as soon as it is known; 1 where one could not be had."""
    asked, typed = _read(words)
    found = [_one(asked, typed)] if asked.family else [each for each in settings() if fnmatch(str(each), asked.only)]
    if asked.list:
        print("\n".join(map(str, found)))
        return 0
    failed = 0
    for number, setting in enumerate(found, start=1):
        began = time.monotonic()
        try:
            rows = measure(setting)
        except (PacelineError, Failed) as error:
            failed += 1
            print(f"{number}/{len(found)} {setting}: NOT HAD: {error}", file=sys.stderr, flush=True)
            continue
        _write(rows, asked.out)
        print(
            f"{number}/{len(found)} {_line(setting, rows)}, {time.monotonic() - began:.1f} s",
            file=sys.stderr,
            flush=True,
        )
    return int(failed > 0)


def _read(words: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory", description=__doc__)
    parser.add_argument("family", nargs="?", help="one setting of this family; without it, the list")
    parser.add_argument("layout", nargs="?", default="single")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--batch", type=int, default=8, help="global batch")
    parser.add_argument("--micro", type=int)
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--optimizer", default="adamw")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, help="a file that lines are added to; without it they are printed")
    parser.add_argument("--only", default="*", help="settings of the list whose name is like this")
    parser.add_argument("--list", action="store_true", help="say what would be run")
    return parser.parse_known_args(words)


def _one(asked: argparse.Namespace, typed: Sequence[str]) -> Setting:
    """`--job.depth=8` are the job's own parameters."""
    wrong = [word for word in typed if not (word.startswith("--job.") and "=" in word)]
    if wrong:
        raise SystemExit(f"{wrong[0]}: expected --job.NAME=VALUE")
    pairs = (word.removeprefix("--job.").split("=", 1) for word in typed)
    names = ("family", "layout", "ranks", "batch", "micro", "precision", "optimizer", "threads")
    return Setting(**{name: getattr(asked, name) for name in names}, job=dict(pairs))


def _write(rows: Sequence[dict[str, Any]], out: Path | None) -> None:
    text = "".join(f"{json.dumps(row)}\n" for row in rows)
    if out is None:
        print(text, end="", flush=True)
        return
    with out.open("a", encoding="utf-8") as file:
        file.write(text)


def _line(setting: Setting, rows: Sequence[dict[str, Any]]) -> str:
    most = max(rows, key=lambda row: row["peak_live"])
    return (
        f"{setting}: {most['peak_live'] / 1e6:.1f} MB live in {most['phase']}, {most['rss_peak'] / 1e6:.0f} MB resident"
    )


if __name__ == "__main__":
    raise SystemExit(main())
