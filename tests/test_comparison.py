"The comparison of methods: rows, reasons, resumption and the ledger, at the smallest scale."
import json
import pytest
from trace_nb.comparison import ROWS, compare, compare_seeds, comparison_table, stated_rollouts
from trace_nb.core.trajectory import InputError
from trace_nb.pipeline import Parameters

METHODS = ("base_again", "prompt_only", "multi_grpo", "core_tsv", "adp", "awm")

@pytest.fixture(scope="module")
def done(tmp_path_factory):
    folder, lines = tmp_path_factory.mktemp("compare"), []
    return folder, compare(folder, Parameters(scale="smoke"), METHODS, lines.append), lines

def test_every_method_has_a_row_or_a_reason(done):
    _, result, _ = done
    rows, missing = {r["method"] for r in result["rows"]}, {n["method"]: n["reason"] for n in result["not_run"]}
    assert rows | set(missing) >= {*METHODS, "base", "do_nothing", "routed"}
    assert missing["adp"] == missing["awm"] == "no data"

def test_rows_carry_the_tests_and_the_budget(done):
    _, result, _ = done
    row = next(r for r in result["rows"] if r["method"] == "base_again" and r["target"] == "desk")
    assert row["tasks"] == 60 and row["low"] <= row["rate"] <= row["high"] and 0 <= row["p_vs_base"] <= 1 and row["rollouts"] == 0
    assert "base_again" in comparison_table(result, "desk")

def test_what_was_spent_is_what_was_stated(done):
    folder, result, _ = done
    budget = json.loads((folder/"trace"/"manifest.json").read_text())["budget"]
    capabilities = sum(n.startswith("gate ") for n in budget)
    stated, spent = stated_rollouts(Parameters(scale="smoke"), capabilities), {r["method"]: r["total"] for r in result["ledger"]}
    assert (spent["prompt_only"], spent["base_again"]) == (stated["prompt_only"], stated["base_again"])
    refused, again = sum(n.startswith("train ") for n in budget) - capabilities, 8      # rollouts of a step: the pre-flight may play a second one
    assert stated["routed"] <= spent["routed"] <= stated["routed"] + again * capabilities + refused * (8 + 2 * again)

def test_a_second_call_plays_nothing(done):
    folder, result, _ = done
    lines = []
    again = compare(folder, Parameters(scale="smoke"), METHODS, lines.append)
    assert again["rows"] == result["rows"] and not any(" rollouts, " in line for line in lines)

def test_an_unknown_method_is_named_before_anything_is_played(tmp_path):
    with pytest.raises(InputError, match="unknown method 'magic'"): compare_seeds(tmp_path/"x", Parameters(scale="smoke"), [0], ("magic",))
    assert not (tmp_path/"x").exists() and "routed:channel" in ROWS
