"What a row cost: read from run folders, from logs and from the clock."
import json, time

import pytest

from trace_nb.core.trajectory import InputError, write_json
from trace_nb.evaluate.ledger import STAGES, budget_table, charge, charge_log, charge_trajectories, combined, equal_budget, ledger_record, ledger_rows, run_records, timed, total_rollouts, total_tokens
from conftest import episode


def manifest(folder, budget, **more):
    write_json({"parameters": {"seed": 5}, "budget": {n: {"rollouts": r, "tokens": t} for n, (r, t) in budget.items()},
                "stages": {n: {"seconds": 2., "result": {}} for n in budget}} | more, folder/"manifest.json")


def test_every_rollout_of_a_run_is_in_the_ledger_but_the_evaluation(tmp_path):
    budget = {"base": (10, 100), "synthesize": (20, 200), "train a": (30, 300), "gate a": (40, 400), "train b": (50, 500), "gate b": (60, 600), "adapt": (7, 70), "evaluate": (1000, 1), "report": (0, 0)}
    manifest(tmp_path, budget)
    base, a, b, routed = run_records(tmp_path)
    assert [r["method"] for r in (base, a, b, routed)] == ["base", "single:a", "single:b", "routed"] and {r["seed"] for r in (a, b, routed)} == {5}
    assert total_rollouts(routed) == 10 + 20 + 30 + 40 + 50 + 60 + 7 and total_tokens(routed) == 10 * total_rollouts(routed)
    assert [total_rollouts(r) for r in (base, a, b)] == [0, 100, 140]
    assert routed["rollouts"] == {"selection": 10, "calibration": 20, "refill": 0, "training": 80, "validation": 107} and routed["wall_seconds"] == 2. * 7


def test_refills_come_from_the_log_unless_it_contradicts_the_manifest(tmp_path):
    manifest(tmp_path, {"train a": (48, 4800), "train b": (48, 4800)})
    for name, rollouts in (("a", [32, 16]), ("b", [32, 99])):
        folder = tmp_path/"adapters"/name; folder.mkdir(parents=True)
        lines = [json.dumps({"rollouts": n, "tokens": 100 * n, "refilled_groups": 2}) + "\n" for n in rollouts]
        (folder/"training_log.jsonl").write_text("".join(lines) + '{"rollouts": 3')
    _, a, b, routed = run_records(tmp_path, 4)
    assert run_records(tmp_path)[1]["rollouts"]["training"] == 48, "without the size of a group"
    assert (a["rollouts"]["refill"], a["rollouts"]["training"], a["tokens"]["refill"]) == (16, 32, 1600)
    assert (b["rollouts"]["refill"], b["rollouts"]["training"]) == (0, 48) and total_rollouts(routed) == 96 and total_tokens(routed) == 9600


def test_a_folder_without_a_budget_is_refused(tmp_path):
    with pytest.raises(InputError, match="manifest.json: no such file"): run_records(tmp_path)
    write_json([1], tmp_path/"manifest.json")
    with pytest.raises(InputError, match="holds no budget"): run_records(tmp_path)


def test_a_run_folder_is_read_as_it_is(run):
    write_json({"parameters": {}, "budget": {}, "stages": {}}, run/"manifest.json")
    assert [r["method"] for r in run_records(run)] == ["base", "routed"] and not any(map(total_rollouts, run_records(run)))


def test_time_adds_up_and_counts_work_not_waiting():
    record = ledger_record("x")
    with timed(record): time.sleep(.2)
    idle = record["cpu_seconds"]
    with timed(record): sum(i * i for i in range(3_000_000))
    assert record["wall_seconds"] >= .2 and idle < .15 and record["cpu_seconds"] - idle > .03 and record["gpu_seconds"] is None
    with pytest.raises(ZeroDivisionError):
        with timed(record): 1 / 0
    assert record["wall_seconds"] > .2


def test_trajectories_logs_and_sums_agree():
    a = charge_trajectories(ledger_record("a"), "validation", [episode("m", "t", k, True) for k in range(3)])
    b = charge_log(ledger_record("b"), [{"rollouts": 10, "tokens": 101, "refilled_groups": 1}], 3)
    both = combined("both", [a, b])
    assert total_rollouts(both) == 13 and total_tokens(both) == 101 and both["rollouts"] == dict(zip(STAGES, (0, 0, 3, 7, 3)))
    assert json.loads(json.dumps(ledger_rows([both])))[0]["total"] == 13


def test_rows_of_unequal_budget_are_named():
    records = [charge(ledger_record(m), "training", n) for m, n in {"base": 0, "a": 1000, "b": 1040, "c": 960, "d": 500, "e": 1100}.items()]
    found = {v["method"]: (v["comparable"], v["verdict"]) for v in equal_budget(records)}
    assert [found[m][0] for m in "abcde"] == [True, True, True, False, False] and found["base"][0] is None
    assert found["d"][1] == "50% less than the budget: its gain is understated" and "10% more" in found["e"][1]
    assert [v["comparable"] for v in equal_budget(records, budget=500)] == [None, False, False, False, True, False]
    assert {v["comparable"] for v in equal_budget(records, tolerance=.6)} == {None, True}


def test_the_table_shows_what_there_is():
    records = [charge(ledger_record("a", seed), "training", 12345) for seed in (0, 0)]
    assert "12,345" in budget_table(records) and "seed" not in budget_table(records) and "gpu" not in budget_table(records)
    more = [records[0], records[1] | {"seed": 1, "gpu_seconds": 3.}]
    assert "seed" in budget_table(more) and "gpu s" in budget_table(more) and budget_table(more).splitlines()[1].endswith("-")
