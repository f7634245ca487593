"""The report's section about stale updates has the words of each update rule."""

import json
from pathlib import Path
from typing import Any

from paceline.reporting.run_history import History
from paceline.reporting.run_report import run_page
from paceline.reporting.staleness_section import show_staleness
from paceline.run_folder.run_folder import RunFolder


def told_of(update: str, *told: dict[str, Any]) -> str:
    event = {"event": "Staleness", "step": 20, "update": update, "told": list(told)}
    return show_staleness(
        History(run=RunFolder(Path("run")), steps={}, events=[event], num_unreadable={}, num_discarded=0)
    )


def test_a_pipeline_counts_microbatches_and_others_count_gradients() -> None:
    late = [[0, 1], [1, 19]]
    pipeline = told_of("pipedream", {"who": "stage 0", "late": late, "versions": 2, "sent_bytes": 5 << 10})
    assert (
        "19 microbatches with a staleness of 1 update" in pipeline
        and "2 versions" in pipeline
        and "gradient" not in pipeline
    )
    for rule, told in (("ps,staleness=4", {}), ("hogwild", {"lost": 1, "made": 80})):
        shown = told_of(rule, {"who": "worker 1", "late": late, **told})
        assert "19 gradients with a staleness of 1 update" in shown and "microbatch" not in shown
        assert "from the start of this attempt" in shown


def test_very_late_is_not_drawn_as_not_late() -> None:
    shown = told_of("hogwild", {"who": "worker 0", "late": [[0, 5], [6, 2], [12, 1]], "lost": 0, "made": 80})
    assert shown.count('class="fill0"') == 1 and shown.count('class="fill5"') == 2
    assert '<i class="box0"></i>staleness 0' in shown and '<i class="box5"></i>more' in shown


def test_the_head_says_how_a_batch_became_an_update(tmp_path: Path) -> None:
    def head(**task: str) -> str:
        (tmp_path / "task.json").write_text(json.dumps({"job": "job.py", "layout": "ddp", **task}))
        return run_page(RunFolder(tmp_path)).partition("</header>")[0]

    assert "<dt>update</dt><dd>hogwild</dd>" in head(update="hogwild", compress="none")
    assert "<dt>compress</dt><dd>topk,ratio=0.1</dd>" in head(update="sync", compress="topk,ratio=0.1")
    assert "<dt>update" not in head(update="sync", compress="none") and "<dt>update" not in head()


def test_sites_have_met_and_nothing_was_late() -> None:
    shown = told_of("diloco,every=10", {"who": "rank 0", "late": [], "sent_bytes": 3 << 20, "waited_seconds": 0.2})
    assert "Synchronisation of the sites" in shown and "3.0 MiB" in shown and "200 ms" in shown
    assert told_of("sync") == ""
