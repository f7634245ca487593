"""The page's part about updates that are late: each rule's own words."""

from pathlib import Path
from typing import Any

from paceline.store.runs import RunFolder
from paceline.watch.history import History
from paceline.watch.late import show_late


def told_of(update: str, *told: dict[str, Any]) -> str:
    event = {"event": "Staleness", "step": 20, "update": update, "told": list(told)}
    return show_late(History(run=RunFolder(Path("run")), steps={}, events=[event], torn={}, again=0))


def test_a_pipeline_counts_microbatches_and_others_count_gradients() -> None:
    late = [[0, 1], [1, 19]]
    pipeline = told_of("pipedream", {"who": "stage 0", "late": late, "versions": 2, "sent_bytes": 5 << 10})
    assert "19 microbatches 1 update late" in pipeline and "2 versions" in pipeline and "gradient" not in pipeline
    for rule, told in (("ps,staleness=4", {}), ("hogwild", {"lost": 1, "made": 80})):
        page = told_of(rule, {"who": "worker 1", "late": late, **told})
        assert "19 gradients 1 update late" in page and "microbatch" not in page
        assert "since this attempt began" in page


def test_very_late_is_not_drawn_as_not_late() -> None:
    page = told_of("hogwild", {"who": "worker 0", "late": [[0, 5], [6, 2], [12, 1]], "lost": 0, "made": 80})
    assert page.count('class="fill0"') == 1 and page.count('class="fill5"') == 2
    assert '<i class="box0"></i>0 late' in page and '<i class="box5"></i>more' in page


def test_sites_have_met_and_nothing_was_late() -> None:
    page = told_of("diloco,every=10", {"who": "rank 0", "late": [], "sent_bytes": 3 << 20, "waited_seconds": 0.2})
    assert "Meetings of the sites" in page and "3.0 MiB" in page and "200 ms" in page
    assert told_of("sync") == ""
