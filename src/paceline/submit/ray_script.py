"""The script for Ray: a driver that Ray starts in its cluster."""

import ast
import shlex
from pathlib import Path

from paceline.console.formatting import plural
from paceline.submit.submission import MAX_RESTARTS, Submission, SubmissionFile, fill_template
from paceline.submit.target_options import RayOptions

_CALL = "RayRun"


def ray_script(submission: Submission, needs: RayOptions, *, max_nodes: int) -> SubmissionFile:
    """Return the script. The training has at least `submission.num_nodes` nodes, and at most `max_nodes`.

    The cluster starts the script in any folder, so its own folders have absolute paths.
    """
    path = (submission.folder / "ray_job.py").absolute()
    command = f"ray job submit -- python {shlex.quote(str(path))}"
    num_nodes, ranks = submission.num_nodes, submission.ranks_per_node
    resources = {"CPU": float(needs.cpus) * ranks, **({"GPU": float(ranks)} if submission.uses_gpus else {})}
    values = {
        **submission.values(),
        "name": repr(submission.name),
        "processes_text": plural(ranks, "process") + (" each" if max_nodes > 1 else ""),
        "nodes_text": plural(num_nodes, "node") if num_nodes == max_nodes else f"{num_nodes} to {max_nodes} nodes",
        "hand_in": command,
        "command": repr(shlex.join(submission.train_command())),
        "folder": repr(str(Path.cwd())),
        "run": repr(submission.run),
        "nodes": repr((num_nodes, max_nodes)),
        "resources": repr(resources),
        "resize_seconds": needs.resize_seconds,
        "max_failures": str(MAX_RESTARTS),
        "hours": repr(submission.hours),
    }
    return SubmissionFile(path=path, text=fill_template("ray_job.txt", values), command=command)


def check_ray_script(text: str) -> list[str]:
    """Return what is wrong with a script, which may have been changed by hand."""
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        return [f"line {error.lineno}: {error.msg}"]
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == _CALL]
    if len(calls) != 1:
        return [f"there must be one {_CALL}(...), and there are {len(calls)}"]
    problems = []
    for keyword in calls[0].keywords:
        try:
            ast.literal_eval(keyword.value)
        except ValueError:
            problems.append(f"line {keyword.value.lineno}: {keyword.arg} is no plain value")
    return problems
