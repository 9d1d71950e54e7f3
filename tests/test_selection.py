"""Selection against numbers computed apart from it: the rule to 1e-9, planted deficits, what is missing, and what resamples."""
import itertools, json, math, random

import numpy as np
import pytest

from test_diagnose import conversation
from trace_nb.cli import main
from trace_nb.core.trajectory import InputError
from trace_nb.diagnose.labeling import label_runs
from trace_nb.diagnose.selection import power_table, runs_needed, select, selection_table, simulate_runs

FAILED, PASSED = [f"airline/{n}/0" for n in range(110)], [f"retail/{n}/0" for n in range(54)]
NAMES = [f"capability_{n}" for n in range(9)]


def lists_of(labels):
    "Six lists from id -> label."
    return {f"{kind.lower()}_{side}": [i for i in ids if labels[i] == kind] for side, ids in (("failed", FAILED), ("passed", PASSED)) for kind in ("LACKING", "PRESENT", "NA")}


@pytest.fixture(scope="module")
def labelled():
    "labels[run][capability][id] for 10 runs, 9 candidates, 110 failed and 54 passed tasks; the last candidate is never relevant to a success."
    rng = random.Random(5)
    def one(c, id):
        lacking = .25 + (.09 * c if id in FAILED else 0)
        if rng.random() > (.15, .5, .8)[c % 3] or c == 8 and id in PASSED: return "NA"
        return "LACKING" if rng.random() < lacking else "PRESENT"
    return [{name: {id: one(c, id) for id in FAILED + PASSED} for c, name in enumerate(NAMES)} for _ in range(10)]


def expected(labelled, name, rho, delta):
    "Coverage, gap and verdict run by run in plain loops; their means and population deviations."
    coverages, gaps, passed = [], [], 0
    for run in labelled:
        count = {(kind, side): 0 for kind in ("LACKING", "PRESENT", "NA") for side in (0, 1)}
        for id, kind in run[name].items(): count[kind, int(id in PASSED)] += 1
        relevant = [count["LACKING", side] + count["PRESENT", side] for side in (0, 1)]
        coverages.append(count["LACKING", 0] / 110)
        gap = count["LACKING", 0] / relevant[0] - count["LACKING", 1] / relevant[1] if all(relevant) else None
        if gap is not None: gaps.append(gap)
        passed += gap is not None and coverages[-1] >= rho and gap >= delta
    mean = lambda values: sum(values) / len(values) if values else None
    deviation = lambda values: math.sqrt(sum((v - mean(values)) ** 2 for v in values) / len(values)) if values else None
    return {"mean_coverage": mean(coverages), "std_coverage": deviation(coverages), "mean_gap": mean(gaps), "std_gap": deviation(gaps), "runs_passed": passed}


def write(folder, labelled, seed=None):
    "Label files as others write them: some without NA lists, some that say attempt; with a seed all orders are shuffled."
    rng, order = random.Random(seed), list(range(10))
    if seed is not None: rng.shuffle(order)
    folder.mkdir()
    for n, q in enumerate(order):
        labels = {name: lists_of(labelled[q][name]) for name in NAMES}
        if q % 3 == 0: labels = {name: {k: ids for k, ids in own.items() if not k.startswith("na_")} for name, own in labels.items()}
        if seed is not None:
            labels = {name: {k: rng.sample(ids, len(ids)) for k, ids in rng.sample(list(own.items()), len(own))} for name, own in rng.sample(list(labels.items()), 9)}
        (folder/f"run_{n:02}.json").write_text(json.dumps({"attempt" if q % 2 else "run": q + 1, "totals": {"total_failed": 110, "total_passed": 54}, "labels": labels}))
    return folder


def selected_by_command(folder, *options):
    assert main(["select", str(folder), "--out", str(folder/"selected_capabilities.json"), *options]) == 0
    return json.loads((folder/"selected_capabilities.json").read_text())


def test_rule_to_the_ninth_digit(labelled, tmp_path, capsys):
    result = selected_by_command(write(tmp_path/"labels", labelled))
    assert {e["name"] for e in result["capabilities"]} == set(NAMES) and 1 < sum(e["selected"] for e in result["capabilities"]) < 8
    for entry in result["capabilities"]:
        want = expected(labelled, entry["name"], .10, .20)
        for key, value in want.items(): assert entry[key] == (None if value is None else pytest.approx(value, abs=1e-9)), (entry["name"], key)
        assert entry["selected"] == (want["runs_passed"] >= 8) and entry["runs_total"] == 10
    gaps = [e["mean_gap"] for e in result["capabilities"]]
    assert gaps[:8] == sorted(gaps[:8], reverse=True) and gaps[8] is None
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines[:-1])) <= 130 and "undefined" in lines[9] and "insufficient" in lines[9]


def test_other_thresholds(labelled, tmp_path):
    for entry in selected_by_command(write(tmp_path/"labels", labelled), "--rho", "0.25", "--delta", "0.35", "--required", "5")["capabilities"]:
        assert entry["runs_passed"] == expected(labelled, entry["name"], .25, .35)["runs_passed"] and entry["selected"] == (entry["runs_passed"] >= 5)


def test_no_order_matters(labelled, tmp_path):
    plain = selected_by_command(write(tmp_path/"plain", labelled))
    for seed in (1, 2): assert selected_by_command(write(tmp_path/str(seed), labelled, seed)) == plain


def noisy_runs(rng, rates):
    "Ten labelings of 110 failed and 54 passed trajectories; a tenth of the labels is turned around in each."
    runs = [{"run": q + 1, "totals": {"total_failed": 110, "total_passed": 54}, "labels": {}} for q in range(10)]
    for name, (base, gap) in rates.items():
        truth = {id: rng.random() < base + gap * (id in fails) for fails in [set(FAILED)] for id in FAILED + PASSED}
        for run in runs: run["labels"][name] = lists_of({id: "LACKING" if lacks != (rng.random() < .1) else "PRESENT" for id, lacks in truth.items()})
    return runs


def test_planted_deficits_are_found_and_others_are_not():
    rates = {f"planted_{n}": (.2, .6) for n in range(3)} | {f"null_{n}": (.1 + n / 10, 0) for n in range(6)}
    exact, confirmed, covered = 0, 0, 0
    for seed in range(100):
        entries = select(noisy_runs(np.random.default_rng(seed), rates), replicates=400, seed=seed)["capabilities"]
        exact += {e["name"] for e in entries if e["selected"]} == {name for name in rates if name.startswith("planted")}
        confirmed += sum(e["status"] == "confirmed" for e in entries if e["name"].startswith("null"))
        covered += sum(e["interval"][0] <= .8 * rates[e["name"]][1] <= e["interval"][1] for e in entries)     # noise leaves 80 % of a gap
    assert exact >= 95 and confirmed / 600 <= .05 and covered / 900 >= .93, (exact, confirmed, covered)


def test_power_falls_with_gap_and_relevance():
    share = power_table(gaps=(0, .45), relevances=(.3, 1), simulations=100).set_index(["gap", "relevance"]).selected
    assert share[.45, 1] > .85 and share[.45, 1] >= share[.45, .3] and share[0, 1] <= .03


@pytest.fixture(scope="module")
def large():
    "A fiftieth of 100,000 trajectories x 20 capabilities x 10 runs."
    return simulate_runs({f"c{n}": (.2, .2 + .03 * n) for n in range(20)}, failed=1340, passed=660, relevance=.6, seed=3)


def test_groups_of_tasks_give_the_same_intervals(large, monkeypatch):
    width = lambda: np.mean([np.diff(e["interval"])[0] for e in select(large)["capabilities"]])
    alone = width()
    monkeypatch.setattr("trace_nb.diagnose.selection.MOST_CLUSTERS", 500)
    assert width() == pytest.approx(alone, rel=.06)


def test_large_logs_give_the_same_numbers(large):
    for entry in select(large, replicates=50)["capabilities"]:
        gaps = []
        for run in large:
            own = {k: len(ids) for k, ids in run["labels"][entry["name"]].items()}
            gaps.append(own["lacking_failed"] / (own["lacking_failed"] + own["present_failed"]) - own["lacking_passed"] / (own["lacking_passed"] + own["present_passed"]))
        assert entry["mean_gap"] == pytest.approx(sum(gaps) / 10, abs=1e-12) and entry["interval"][0] < entry["mean_gap"] < entry["interval"][1]


# --- tasks, runs and labels that are missing

def repeated(runs, trials):
    "The same labels for every trial of a task."
    again = lambda ids: [f"{id.rpartition('/')[0]}/{k}" for id in ids for k in range(trials)]
    return [run | {"totals": {k: n * trials for k, n in run["totals"].items()},
                   "labels": {name: {k: again(ids) for k, ids in own.items()} for name, own in run["labels"].items()}} for run in runs]


def test_more_trials_of_the_same_tasks_are_no_more_evidence():
    runs = simulate_runs({"weak": (.2, .45)}, failed=40, passed=20)
    once, often = select(runs), select(repeated(runs, 8))
    assert once["test"] == "Fisher" and often["test"] == "cluster bootstrap"
    one, many = once["capabilities"][0], often["capabilities"][0]
    assert many["interval"] == pytest.approx(one["interval"]) and many["stability"] == one["stability"]
    assert many["support"]["failed"] == 8 * many["support"]["failed_tasks"] and many["minimum_detectable_gap"] == one["minimum_detectable_gap"]


def without(run, ids):
    "The run with the labels of some failed trajectories missing, for one capability."
    own = run["labels"]["a"]
    kept = {k: [i for i in found if i not in ids] for k, found in own.items()} | {"missing_failed": sorted(ids)}
    return run | {"labels": run["labels"] | {"a": kept}}


def test_missing_labels_are_no_labels():
    runs = simulate_runs({"a": (.2, .8), "b": (.2, .8)})
    gone = set(runs[0]["labels"]["a"]["lacking_failed"][:5])
    entry = next(e for e in select([without(runs[0], gone)] + runs[1:])["capabilities"] if e["name"] == "a")
    own = runs[0]["labels"]["a"]
    assert entry["runs"][0]["coverage"] == (len(own["lacking_failed"]) - 5) / 105
    assert entry["missing"] == 5 / 1640 and entry["kappa"] is None and .4 < entry["alpha"] < 1


def test_a_run_with_too_many_missing_labels_does_not_count():
    runs = simulate_runs({"a": (.2, .8), "b": (.2, .8)})
    broken = [without(run, set(run["labels"]["a"]["lacking_failed"][:7])) for run in runs[:2]] + runs[2:]     # 7 of 328 labels are 2.1 %
    result = select(broken)
    assert [r["run"] for r in result["runs"] if not r["valid"]] == [1, 2] and result["capabilities"][0]["runs_total"] == 8
    assert "run 1 (2.1%), run 2 (2.1%)" in selection_table(result)
    with pytest.raises(InputError, match="--required is 9, but there are 8 runs without run 1, 2.*ask for 1 to 8"): select(broken, required=9)
    with pytest.raises(InputError, match="there are 0 runs.*label again"): select(broken[:2], required=1)


def test_nothing_to_select_from():
    with pytest.raises(InputError, match="no runs"): select([])
    empty = {"run": 1, "totals": {"total_failed": 0, "total_passed": 0}, "labels": {"a": {f"{k}_{s}": [] for k in ("lacking", "present") for s in ("failed", "passed")}}}
    with pytest.raises(InputError, match="hold no trajectory"): select([empty], required=1)
    turned = simulate_runs({"a": (.2, .8)}, runs=1)[0]
    turned = turned | {"run": 2, "labels": {"a": {k.replace("failed", "x").replace("passed", "failed").replace("x", "passed"): ids for k, ids in turned["labels"]["a"].items()}}}
    with pytest.raises(InputError, match="simulated/.*is failed in one list and passed in another"): select(simulate_runs({"a": (.2, .8)}, runs=1) + [turned], required=1)


def test_draws_of_one_labelling_have_no_agreement():
    log = [conversation(task, trial, success=bool(task % 2), forgets=not task % 2) for task in range(10, 40) for trial in range(2)]
    result = select(label_runs(log))
    assert all(e[key] is None for e in result["capabilities"] for key in ("kappa", "alpha", "kappa_lacking", "alpha_lacking"))
    assert "identical across runs by construction" in selection_table(result)
    found = result["capabilities"][0]
    assert found["name"] == "multi_step_task_completion" and found["selected"] and found["status"] == "confirmed" and found["p"] < .01
    idle = next(e for e in result["capabilities"] if e["mean_gap"] is None)
    assert idle["status"] == "insufficient evidence" and [idle[k] for k in ("interval", "p", "q", "minimum_detectable_gap")] == [None] * 4


@pytest.mark.parametrize("required", range(1, 7))
def test_stopping_early_never_changes_the_verdict(required):
    for verdicts in itertools.product([True, False], repeat=6):
        n = runs_needed(list(verdicts), required, 6)
        could_end = lambda n: {sum(verdicts[:n]) + more >= required for more in range(6 - n + 1)}
        assert could_end(n) == {sum(verdicts) >= required} and len(could_end(n - 1)) == 2
        assert runs_needed(list(verdicts[:n - 1]), required, 6) is None
