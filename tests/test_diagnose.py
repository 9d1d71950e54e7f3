"""Diagnosis end to end: a real log, the contracts of the label files, and every way in which they can be bad."""
import json, math
from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path

import pytest

from trace_nb.core.trajectory import InputError, Trajectory, read_trajectories, write_trajectories
from trace_nb.diagnose.labeling import CANDIDATES, LABELS, check_run, label, label_file, label_rows, label_runs, outcome, read_label_runs, write_labels
from trace_nb.diagnose.logs import import_log, read_log
from trace_nb.diagnose.selection import contrastive_gap, coverage, error_rate, select, select_dir, selection_table

REAL_LOG = Path(__file__).resolve().parents[2]/"shared"/"data"/"tau_bench_gpt4o_airline.json.xz"
needs_log = pytest.mark.skipif(not REAL_LOG.exists(), reason=f"the real tau-bench log is not at {REAL_LOG}")


@pytest.fixture(scope="module")
def real():
    return read_log(REAL_LOG)


def conversation(task, trial, success, forgets=False):
    "A user asks for two cancellations; the agent carries out both, or forgets the second."
    ids, messages = [f"#W{task}1", f"#W{task}2"], [{"role": "user", "content": f"Please cancel #W{task}1, then cancel #W{task}2."}]
    for n, order in enumerate(ids[:1] if forgets else ids):
        for name, extra, status in (("get_order_details", {}, "pending"), ("cancel_pending_order", {"reason": "no longer needed"}, "cancelled")):
            call = {"id": f"{name}_{n}", "type": "function", "function": {"name": name, "arguments": {"order_id": order, **extra}}}
            messages += [{"role": "assistant", "content": None, "tool_calls": [call]},
                         {"role": "tool", "tool_call_id": call["id"], "name": name, "content": json.dumps({"order_id": order, "status": status})}]
    messages.append({"role": "assistant", "content": "Done."})
    return Trajectory(f"desk:retail/{task}/{trial}", str(task), trial, None, "desk:retail", "test", messages,
                      reward=float(success), success=success, metadata={"domain": "retail"})


@pytest.fixture
def small():
    "Ten tasks of two trials; even tasks fail because the second cancellation is forgotten."
    return [conversation(task, trial, success=bool(task % 2), forgets=not task % 2) for task in range(10, 20) for trial in range(2)]


# --- the real log

@needs_log
def test_real_log_counts(real, tmp_path):
    text = import_log(REAL_LOG, tmp_path/"t.jsonl")
    assert "200 trajectories, 84 passed" in text
    trajectories = read_trajectories(tmp_path/"t.jsonl")
    assert trajectories == real[0] and len({t.id for t in trajectories}) == 200
    assert all(isinstance(t.task_id, str) and t.environment == "tau_bench:airline" and "gold" in t.metadata for t in trajectories)
    assert real[1] == {"format": "tau_bench", "read": 200, "passed": 84, "without_outcome": 0, "skipped": []}


@needs_log
def test_real_log_end_to_end(tmp_path):
    import_log(REAL_LOG, tmp_path/"t.jsonl")
    label_file(tmp_path/"t.jsonl", tmp_path/"labels")
    text = select_dir(tmp_path/"labels", out=tmp_path/"selected_capabilities.json")
    assert all(c in text for c in CANDIDATES)
    ranking = json.loads((tmp_path/"selected_capabilities.json").read_text())["capabilities"]
    # precondition_verification is near the threshold on this log (some seeds pass it, some do not), so it is not asserted
    assert "multi_step_task_completion" in {e["name"] for e in ranking if e["selected"]}
    gaps = [e["mean_gap"] for e in ranking]
    assert gaps == sorted(gaps, reverse=True)


@needs_log
def test_real_labels_are_a_partition(real):
    sides = Counter(map(outcome, real[0]))
    assert sides["passed"] == 84 and 60 < sides["failed"] < 116   # the rest failed by another's fault than the agent's
    for run in label_runs(real[0], runs=3):
        assert .75 * (200 - sides[None]) < sum(run["totals"].values()) < 200 - sides[None]
        for lists in run["labels"].values():
            for side in ("failed", "passed"):
                ids = [i for kind in LABELS for i in lists[f"{kind.lower()}_{side}"]]
                assert len(ids) == len(set(ids)) == run["totals"][f"total_{side}"]


@needs_log
def test_real_labels_are_blind(real):
    flipped = [replace(t, success=not t.success, reward=1 - t.reward, parts={"r": 1.0}) for t in real[0]]
    rows, passed = label_rows(real[0]), {t.id for t in real[0] if t.success}
    assert rows == label_rows(flipped)
    assert any(row["label"] == "LACKING" and row["id"] in passed for row in rows)


# --- labels and runs

def test_the_forgotten_operation(small):
    assert {label(t)["multi_step_task_completion"].label for t in small if t.success} == {"PRESENT"}
    assert {label(t)["multi_step_task_completion"].label for t in small if not t.success} == {"LACKING"}
    assert {label(t)["precondition_verification"].label for t in small} == {"PRESENT"}


def test_subsamples_are_whole_tasks(small):
    runs = label_runs(small, runs=10)
    assert [r["run"] for r in runs] == list(range(1, 11))
    drawn = set()
    for run in runs:
        trials = defaultdict(set)
        for side in ("failed", "passed"):
            for kind in LABELS:
                for id in run["labels"]["early_termination"][f"{kind.lower()}_{side}"]: trials[id.split("/")[1]].add(id)
        assert len(trials) == 8 and all(len(ids) == 2 for ids in trials.values())
        drawn.add(frozenset(trials))
    assert len(drawn) > 1


def test_same_seed_same_runs_in_any_order(small):
    assert label_runs(small, seed=3) == label_runs(small[::-1], seed=3) != label_runs(small, seed=4)
    assert select(label_runs(small)) == select(label_runs(small[::-1]))


def test_infrastructure_faults_are_no_failures(small):
    broken = [replace(t, termination="environment_error") for t in small[:4]]
    assert label_runs(broken + small[4:], runs=1, fraction=1)[0]["totals"] == {"total_failed": 8, "total_passed": 8}
    with pytest.raises(InputError, match="no trajectory passed or failed by the agent's fault"): label_runs(broken)
    silent = [replace(t, messages=[*t.messages[:-1], {"role": "assistant", "content": None}]) if not t.success else t for t in small]
    assert label_runs(silent, runs=1, fraction=1)[0]["totals"] == {"total_failed": 0, "total_passed": 10}


def test_labels_round_trip(small, tmp_path):
    runs = label_runs(small, runs=4)
    write_labels(label_runs(small, runs=6), label_rows(small), tmp_path)
    (tmp_path/"notes.json").write_text("not a run")
    write_labels(runs, label_rows(small), tmp_path)
    assert read_label_runs(tmp_path) == runs
    assert (tmp_path/"notes.json").exists() and not (tmp_path/"run_05.json").exists()
    rows = [json.loads(line) for line in (tmp_path/"labels.jsonl").read_text().splitlines()]
    assert len(rows) == len(small) * len(CANDIDATES) and all(r["evidence"] for r in rows)


# --- label files from elsewhere

def foreign(**lists):
    given = {"lacking_failed": ["a"], "present_failed": ["b"], "lacking_passed": [], "present_passed": ["d"]} | lists
    return {"attempt": 7, "totals": {"total_failed": 3, "total_passed": 1}, "labels": {"tone": given}}


def test_foreign_label_file():
    run = check_run("run_07.json", foreign())
    assert run["run"] == 7 and run["labels"]["tone"]["na_failed"] == []
    assert coverage(run["labels"]["tone"], run["totals"]["total_failed"]) == 1/3


@pytest.mark.parametrize("lists, parts", [
    ({"present_failed": ["a"]}, ["run 7", "tone", "a stands in lacking_failed and in present_failed"]),
    ({"present_passed": ["b"]}, ["run 7", "tone", "b stands in present_failed and in present_passed"]),
    ({"lacking_failed": ["a", "a"]}, ["tone", "a stands in lacking_failed and in lacking_failed"]),
    ({"lacking_failed": ["a", "x", "y"]}, ["tone", "4 failed trajectories are labelled, the totals say 3"]),
    ({"na_failed": []}, ["tone", "1 of 3 failed trajectories have no label"]),
    ({"lacking_failed": "a"}, ["tone", "lacking_failed is not a list"]),
])
def test_bad_partition(lists, parts):
    with pytest.raises(InputError) as e: check_run("run_07.json", foreign(**lists))
    assert all(part in str(e.value) for part in parts) and "\n" not in str(e.value)


def test_missing_list_and_missing_label():
    given = foreign(); del given["labels"]["tone"]["present_failed"]
    with pytest.raises(InputError, match="no list present_failed"): check_run("run_07.json", given)
    full = {"lacking_failed": ["a"], "present_failed": ["b"], "na_failed": ["c"], "lacking_passed": [], "present_passed": ["d"], "na_passed": []}
    given = foreign(); given["labels"] = {"tone": full, "format": full | {"na_failed": []}}
    with pytest.raises(InputError, match="format: c has no label"): check_run("run_07.json", given)
    given["labels"]["format"] = full | {"na_failed": [], "na_passed": ["c"]}
    with pytest.raises(InputError, match="format: c is passed here and failed elsewhere"): check_run("run_07.json", given)


def test_bad_label_folders(tmp_path, small):
    with pytest.raises(InputError, match="no such folder"): read_label_runs(tmp_path/"nowhere")
    with pytest.raises(InputError, match="holds no run_NN.json"): read_label_runs(tmp_path)
    (tmp_path/"run_01.json").write_text("{")
    with pytest.raises(InputError, match="not valid JSON"): read_label_runs(tmp_path)
    with pytest.raises(InputError, match="is a file"): read_label_runs(tmp_path/"run_01.json")
    (tmp_path/"run_01.json").write_text("[]")
    with pytest.raises(InputError, match="no run number"): read_label_runs(tmp_path)
    for n in (1, 2): (tmp_path/f"run_0{n}.json").write_text(json.dumps(foreign()))
    with pytest.raises(InputError, match="run 7 stands in another file too"): read_label_runs(tmp_path)
    (tmp_path/"run_02.json").write_text(json.dumps(foreign() | {"attempt": 8, "labels": {"other": foreign()["labels"]["tone"]}}))
    with pytest.raises(InputError, match="run 7: no labels for other"): read_label_runs(tmp_path)


# --- selection

def lists(lf, pf, ls, ps): return {"lacking_failed": lf, "present_failed": pf, "na_failed": [], "lacking_passed": ls, "present_passed": ps, "na_passed": []}


def test_undefined_stays_undefined():
    nothing = lists([], [], [], [])
    assert math.isnan(error_rate(nothing, "failed")) and math.isnan(coverage(nothing, 0))
    only_failures = lists(["a", "b"], [], [], [])
    assert math.isnan(contrastive_gap(only_failures))
    run = {"run": 1, "totals": {"total_failed": 2, "total_passed": 0}, "labels": {"tone": only_failures}}
    entry = select([run], required=1)["capabilities"][0]
    assert entry["mean_gap"] is None and entry["runs_passed"] == 0 and entry["runs_undefined"] == 1 and not entry["selected"]
    assert "undefined" in selection_table(select([run], required=1))


def test_thresholds_are_inclusive_and_std_is_of_the_population():
    ids = [str(n) for n in range(20)]
    one = {"run": 1, "totals": {"total_failed": 10, "total_passed": 10}, "labels": {"tone": lists(ids[:6], ids[6:10], ids[10:14], ids[14:])}}
    two = {"run": 2, "totals": one["totals"], "labels": {"tone": lists(ids[:8], ids[8:10], ids[10:14], ids[14:])}}
    entry = select([one, two], required=2)["capabilities"][0]
    assert entry["selected"] and entry["runs_passed"] == 2
    assert entry["std_coverage"] == pytest.approx(.1) and entry["mean_gap"] == pytest.approx(.3)


@pytest.mark.parametrize("options, remedy", [({"required": 9}, "ask for 1 to 4"), ({"required": 0}, "ask for 1 to 4"),
                                             ({"rho": 1.5, "required": 1}, "between 0 and 1"), ({"delta": math.nan, "required": 1}, "between -1 and 1")])
def test_bad_thresholds(small, options, remedy):
    with pytest.raises(InputError, match=remedy): select(label_runs(small, runs=4), **options)


def test_select_keeps_an_earlier_result(small, tmp_path):
    out = tmp_path/"selected_capabilities.json"; out.write_text("earlier")
    write_labels(label_runs(small, runs=2), label_rows(small), tmp_path/"labels")
    with pytest.raises(InputError): select_dir(tmp_path/"labels", required=8, out=out)
    assert out.read_text() == "earlier"
    select_dir(tmp_path/"labels", required=2, out=out)
    assert json.loads(out.read_text())["capabilities"][0]["name"] == "multi_step_task_completion"


def test_an_unknown_analyst_is_named(tmp_path, small):
    write_trajectories(small, tmp_path/"log.jsonl")
    with pytest.raises(InputError, match="unknown analyst 'magic'; known: rules"): label_file(tmp_path/"log.jsonl", tmp_path/"labels", analyst="magic")
