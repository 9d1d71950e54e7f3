"The evaluation table at full size: speed, agreement with one-at-a-time statistics, and a gain that is no skill."

import numpy as np
import pandas as pd
import pytest

from trace_nb.core.statistics import cluster_interval, holm, mcnemar, paired_permutation, pass_at_k, pass_hat_k
from trace_nb.evaluate.evaluate import compare, complement, composed, excluded_trials, format_table, noise_floor, oracle_choice, pairwise, placebo_oracle, results_table, table_rows

FIRST_COLUMNS = ["method", "target", "split", "tasks", "trials", "successes", "rate", "low", "high", "mean_reward", "p_vs_base"]


def played(methods, tasks=60, trials=4, seed=0, domains=("airline", "retail")):
    "A frame of `methods` {name: gain over the base} on tasks of different difficulty."
    rng = np.random.default_rng(seed)
    p = rng.beta(1, 1.5, tasks)
    rows = [(m, "desk", domains[i >= tasks // 3], "test", f"t{i}", k, bool(rng.random() < np.clip(p[i] + gain, 0, 1)))
            for m, gain in methods.items() for i in range(tasks) for k in range(trials)]
    frame = pd.DataFrame(rows, columns=["method", "target", "domain", "split", "task_id", "trial", "success"])
    return frame.assign(reward=frame.success.astype(float), termination="done", environment="desk").astype({"success": "boolean"})


def test_twenty_methods_have_a_row_for_each_part():
    frame = played({"base": 0., **{f"method_{i}": .02 * i for i in range(1, 20)}})
    table = results_table(frame)
    assert len(table) == 60 and list(table)[:len(FIRST_COLUMNS)] == FIRST_COLUMNS
    few = frame[frame.method.isin(["base", "method_9"])]
    assert table_rows(results_table(few)) == table_rows(results_table(few))


def test_the_table_says_what_single_functions_say():
    frame = played({"base": 0., "single:a": .15, "routed": .3, "do_nothing": -1.})
    table = results_table(frame).set_index(["target", "method"])
    means = lambda m, target: frame[(frame.method == m) & ((frame.domain == target[5:]) | (target == "desk"))]
    for (target, method), row in table.iterrows():
        own, base = means(method, target), means("base", target)
        rate, low, high = cluster_interval(own)
        assert row.rate == pytest.approx(rate) and abs(row.low - low) < .03 and abs(row.high - high) < .03
        assert row.pass_hat_k == pytest.approx(pass_hat_k(own, 4)) and row.pass_at_k == pytest.approx(pass_at_k(own, 4)) and row.k == 4
        if method == "base": assert row.p_vs_base is None and row.p_holm is None; continue
        a, b = (f.astype({"success": float}).groupby("task_id", sort=False).success.mean() for f in (base, own))
        assert abs(row.p_vs_base - paired_permutation(a, b)) < .02
    block = table.loc["desk"]
    assert block.p_holm[["single:a", "routed"]].tolist() == pytest.approx(holm(block.p_vs_base[["single:a", "routed"]].tolist()))
    assert block.p_holm["do_nothing"] is None


def test_one_trial_a_task_is_mcnemar_and_missing_tasks_are_left_out():
    frame = played({"base": 0., "routed": .3}, trials=1)
    frame = frame[~((frame.method == "routed") & frame.task_id.isin(["t1", "t2"]))]
    row = results_table(frame).set_index(["target", "method"]).loc[("desk", "routed")]
    wide = frame.astype({"success": float}).pivot(index="task_id", columns="method", values="success").dropna()
    gained, lost = int((wide.routed > wide.base).sum()), int((wide.routed < wide.base).sum())
    assert row.p_vs_base == pytest.approx(mcnemar(gained, lost)) and row.tasks == 58
    found = compare(frame, "base", "routed")
    assert (found["test"], found["gained"], found["lost"], found["tasks"]) == ("mcnemar", gained, lost, 58)
    assert found["low"] < found["difference"] < found["high"] and found["difference"] == pytest.approx((wide.routed - wide.base).mean())


def test_nothing_in_common_is_undefined():
    frame = pd.concat([played({"base": 0.}, tasks=6), played({"routed": 0.}, tasks=6).assign(task_id=lambda d: "other_" + d.task_id)])
    assert results_table(frame).set_index(["target", "method"]).p_vs_base[("desk", "routed")] is None
    found = compare(frame, "base", "routed")
    assert found["tasks"] == 0 and np.isnan(found["p"]) and np.isnan(found["difference"])


def test_refusing_everything_is_no_skill():
    "A method that gains only where doing nothing is right has no gain on the complement."
    frame = played({"base": 0.}, tasks=40)
    idle = {f"t{i}" for i in range(12)}
    silent = frame.assign(method="do_nothing", success=frame.task_id.isin(idle))
    refuser = frame.assign(method="refuser", success=frame.task_id.isin(idle) | frame.success.astype(bool))
    whole = pd.concat([frame, silent, refuser], ignore_index=True).astype({"success": "boolean"})
    assert compare(whole, "base", "refuser")["difference"] > .05
    rest = complement(whole)
    assert rest.task_id.nunique() == 28 and compare(rest, "base", "refuser")["difference"] == 0


def test_pairs_are_adjusted_together():
    table = pairwise(played({"base": 0., "a": .1, "b": .2, "c": .3}))
    assert len(table) == 6 and table.p_holm.tolist() == pytest.approx(holm(table.p.tolist()))


def test_equal_candidates_are_a_placebo():
    "Over many worlds of equal coins the union is no better than repeated sampling, though the oracle looks better than the base."
    differences, gains = [], []
    for seed in range(5):
        frame = played({"base": 0., "single:a": 0., "single:b": 0.}, tasks=120, seed=seed)
        differences.append(placebo_oracle(frame)["difference"])
        gains.append(compare(pd.concat([frame, composed(frame, oracle_choice(frame), "oracle_routed")]), "base", "oracle_routed")["difference"])
    assert abs(np.mean(differences)) < .02 and np.mean(gains) > .1


def test_the_noise_floor_needs_two_trials():
    assert np.isnan(noise_floor(played({"base": 0.}, trials=1))) and 0 < noise_floor(played({"base": 0.})) < .15


def test_what_was_never_answered_is_no_failure():
    "A server that is away for some trials leaves the rate of the others as it is, and is reported apart."
    frame = played({"base": 0., "served": .2}, tasks=12, trials=2)
    away = (frame.method == "served") & (frame.trial == 1)
    broken = frame.assign(termination=frame.termination.mask(away, "policy_error"), success=frame.success.mask(away, False), reward=frame.reward.mask(away, 0.))
    table, alone = results_table(broken), results_table(frame[~away])
    assert table_rows(table) == table_rows(alone) and table.attrs["left_out"] == {"policy_error": 12}
    assert excluded_trials(broken)[["method", "termination", "trials"]].values.tolist() == [["served", "policy_error", 12]]
    assert "12 trials left out of the rates, since they say nothing about the agent: 12 policy error." in format_table(table)
