"""The report of a run folder: complete in itself, safe, and never stopped by a missing or broken file."""
import re
from html.parser import HTMLParser

import pytest

from conftest import SKILL
from trace_nb.core.trajectory import InputError
from trace_nb.evaluate.report import write_report


class Elements(HTMLParser):
    "Every real tag and attribute of a page, which escaped text is not."
    def __init__(self): super().__init__(); self.tags, self.attributes = set(), []
    def handle_starttag(self, tag, attributes): self.tags.add(tag); self.attributes += attributes


def test_the_page_is_complete_in_itself(run):
    page = write_report(run).read_text(encoding="utf-8")
    found = Elements()
    found.feed(page)
    assert not found.tags & {"script", "img", "link", "iframe", "object", "embed", "base", "form"}
    assert not [name for name, _ in found.attributes if name.startswith("on")]
    for name, value in found.attributes:
        if name in ("src", "href", "xlink:href"): assert value.startswith(("#", "data:image/png;base64,")), value
        elif not name.startswith("xmlns"): assert "://" not in (value or ""), value
    assert "@import" not in page and not re.search(r"url\((?!#)", page)
    ids = [value for name, value in found.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    assert page.count("<figure") == 5 and 'class="missing"' not in page


def test_ten_episodes_in_pairs_and_the_same_every_time(run):
    page = write_report(run).read_bytes()
    assert page.count(b'class="trajectory"') == 10 and page.count(b'class="pair"') == 5
    assert b'>solved<' in page and b'>failed<' in page
    assert write_report(run).read_bytes() == page


PARTS = ["manifest.json", "result.json", "evaluations.parquet", "capabilities.json", f"adapters/{SKILL}/training_log.jsonl",
         f"adapters/{SKILL}/capability.json", "routing.json", "trajectories/base.jsonl", "trajectories/routed.jsonl"]

@pytest.mark.parametrize("parts", [["result.json"], ["evaluations.parquet"], ["trajectories/base.jsonl"], PARTS])
def test_parts_may_be_missing(run, parts):
    for part in parts: (run/part).unlink()
    page = write_report(run).read_text(encoding="utf-8")
    assert page.count("<section") == 7 and (len(parts) == 1 or page.count('class="missing"') >= 7)


@pytest.mark.parametrize("content", [b'{"rows": [{"x"', b"[]", b"{}", b'{"rows": [], "capabilities": {}, "confusion": 3, "seconds": []}', b"\xff\x00"])
def test_parts_may_be_broken(run, content):
    for part in PARTS: (run/part).write_bytes(content)
    assert write_report(run).read_text(encoding="utf-8").count("<section") == 7


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(InputError, match="no such run folder"): write_report(tmp_path/"nowhere")


def test_a_training_of_one_step_is_drawn():
    import pandas as pd
    from matplotlib.figure import Figure
    from trace_nb.evaluate.figures import plot_training_curve
    ax = plot_training_curve(pd.DataFrame([{"step": 1, "reward": .25, "success": .5, "informative": 1.}]), Figure().subplots())
    seen = {line.get_ydata()[0] for line in ax.lines if line.get_marker() not in ("None", "", None)}
    assert seen == {.25, .5, 1.}


@pytest.mark.parametrize("accepted", [True, False])
def test_a_run_without_an_adapter_says_what_routed_is(run, accepted):
    "In the report, in the table that `trace-nb run` prints, and in a comparison's."
    from trace_nb.comparison import comparison_table
    from trace_nb.core.trajectory import read_json, write_json
    from trace_nb.pipeline import summary
    result, said = read_json(run/"result.json"), "No adapter was accepted: routed is the base itself"
    if not accepted: result["rows"] = [r for r in result["rows"] if not r["method"].startswith("single:")]
    write_json(result, run/"result.json")
    assert write_report(run).read_text(encoding="utf-8").count(said) == summary(result).count(said) == (not accepted)
    nothing = dict.fromkeys(("difference", "difference_low", "difference_high", "rollouts", "p_vs_base", "p_holm", "p_vs_routed"))
    assert comparison_table({"rows": [r | nothing for r in result["rows"]], "not_run": []}, "desk").count(said) == (not accepted)


@pytest.mark.parametrize("accepted", [True, False])
def test_a_run_without_an_adapter_is_evaluated_as_its_base_and_that_is_said(run, monkeypatch, accepted):
    from trace_nb import pipeline
    from trace_nb.core.policy import load_policy
    monkeypatch.setattr(pipeline, "routed_agent", lambda folder, tasks: (load_policy("do_nothing"), [None] * len(tasks), "routed"))
    if not accepted: (run/"adapters"/SKILL/"capability.json").unlink()
    said = []
    frame = pipeline.evaluate_policy("desk", str(run), "test", 1, say=said.append)
    assert set(frame.method) == {"routed"} and said == ([] if accepted else [f"{run} accepted no adapter: routed is its base"])
