"The experiment notebooks run headless on what a run left on disk, and refuse what they do not know."
import json
from dataclasses import replace

import pytest

from conftest import SKILL
from test_diagnose import conversation
from trace_nb.core.trajectory import InputError, write_json, write_trajectories
from trace_nb.evaluate.notebooks import experiments, experiments_folder, run_notebook


def cells(path):
    return [c for c in json.loads(path.read_text(encoding="utf-8"))["cells"] if c["cell_type"] == "code"]


def shown(path):
    "All text that a notebook's cells printed or returned."
    outputs = [o for c in cells(path) for o in c["outputs"]]
    return "".join("".join(o.get("text") or o.get("data", {}).get("text/plain", "")) for o in outputs)


def figures(path):
    return sum("image/svg+xml" in o.get("data", {}) for c in cells(path) for o in c["outputs"])


def quiet(path):
    "No warnings, no progress bars."
    return not [o for c in cells(path) for o in c["outputs"] if o.get("name") == "stderr"]


@pytest.mark.parametrize("name", experiments())
def test_one_parameters_cell_of_plain_lines_and_no_flags(name):
    code = cells(experiments_folder()/f"{name}.ipynb")
    parameters = [c for c in code if "parameters" in c["metadata"].get("tags", [])]
    assert len(parameters) == 1
    for line in "".join(parameters[0]["source"]).splitlines():
        left, _, meaning = line.partition("  # ")
        assert left.split(" = ")[0].strip().isidentifier() and meaning.strip(), line
    assert not [c for c in code if "#|" in "".join(c["source"])]


def test_labeling_statistics(tmp_path):
    run, folder = tmp_path/"run", tmp_path/"labels"
    log = [conversation(task, trial, success=bool(task % 2), forgets=not task % 2) for task in range(10, 20) for trial in range(2)]
    log.append(replace(conversation(20, 0, success=False), termination="user_error"))
    write_trajectories(log, run/"trajectories"/"base_train.jsonl")
    for number in (1, 2): write_json({"attempt": number, "totals": {"total_failed": 3, "total_passed": 2}, "labels": {"tone": {
        "lacking_failed": ["a", "b"][:number], "present_failed": ["c"], "na_failed": ["b"][number - 1:], "lacking_passed": [], "present_passed": ["d", "e"], "na_passed": []}}}, folder/f"run_{number}.json")
    out = run_notebook("1_labeling_statistics", tmp_path/"out"/"1.ipynb", {"logs": str(run), "labels": str(folder), "out": str(tmp_path/"kept"), "runs": 4, "required": 3}, progress=None)
    text = shown(out)
    assert "21 trajectories of 11 tasks, 10 passed" in text and "desk:retail/20/0: the user broke off" in text and figures(out) == 5 and quiet(out)
    assert "multi_step_task_completion, desk:retail/1" in text and "cancel_pending_order" in json.dumps(cells(out)) and "<mark>" in json.dumps(cells(out)) and "tone" in text
    assert [p.name for p in out.parent.iterdir()] == ["1.ipynb"] and (tmp_path/"kept"/"run_04.json").exists()


def test_environment_sanity_without_a_model(tmp_path):
    out = run_notebook("2_environment_sanity", tmp_path/"2.ipynb", {"environments": "PreconditionRetail", "policy": "oracle", "seeds": 6, "group_size": 2}, progress=None)
    text = shown(out)
    assert "1 environments, 6 tasks each: PreconditionRetail" in text and "PreconditionRetail: 10 passed, 0 failed, 3 skipped" in text
    assert "refuse" in text and figures(out) == 4 and quiet(out)


def test_grpo_runs(run, tmp_path):
    out = run_notebook("grpo_runs", tmp_path/"3.ipynb", {"run": str(run)}, progress=None)
    assert f"{SKILL} (10 steps)" in shown(out) and "accepted" in shown(out) and figures(out) == 2 and quiet(out)


def test_routing_ablation(run, tmp_path):
    out = run_notebook("4_routing_ablation", tmp_path/"4.ipynb", {"run": str(run)}, progress=None)
    text = shown(out)
    assert all(part in text for part in ("regret", "channel  80.0% right", "oracle (bound)", "doing nothing solves 1 of 12 tasks", "two equal runs", "pass@2"))
    assert figures(out) == 3 and quiet(out)


def test_a_misspelt_parameter_is_refused_before_anything_runs(tmp_path):
    with pytest.raises(InputError, match="unknown parameter 'seedz', nothing was run; did you mean seed"): run_notebook("1_labeling_statistics", tmp_path/"1.ipynb", {"seedz": 3})
    with pytest.raises(InputError, match="no such notebook"): run_notebook("1_labelling", tmp_path/"1.ipynb")
    assert list(tmp_path.iterdir()) == []


def test_a_failing_cell_is_named_and_an_earlier_copy_stays(tmp_path):
    out = tmp_path/"4.ipynb"
    out.write_text("earlier")
    with pytest.raises(InputError) as e: run_notebook("4_routing_ablation", out, {"run": str(tmp_path/"nowhere")}, progress=None)
    assert "InputError" in str(e.value) and "no evaluations.parquet" in str(e.value) and "cell " in str(e.value) and "\n" not in str(e.value)
    assert out.read_text() == "earlier" and (tmp_path/"4.failed.ipynb").exists()
