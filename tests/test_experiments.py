"The experiment notebooks run headless on what a run left on disk, and refuse what they do not know."
import json, shutil
from dataclasses import asdict, replace

import pytest

from conftest import SKILL, episode
from test_diagnose import conversation
from trace_nb.core.trajectory import InputError, read_json, write_json, write_trajectories
from trace_nb.evaluate.ledger import charge, equal_budget, ledger_record, ledger_rows
from trace_nb.evaluate.notebooks import experiments, experiments_folder, run_notebook
from trace_nb.pipeline import Parameters


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


def log_lines(path, records):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(map(json.dumps, records)) + '\n{"step": 99, "los')


GATE = {"held_out_base": .4, "held_out_adapter": .7, "held_out_gain": .3, "held_out_gain_interval": [.2, .4], "held_out_p": .0002, "held_out_noise": .08, "held_out_tasks": 96,
        "train_base": .4, "train_adapter": .5, "train_gain": .1, "train_gain_interval": [-.02, .2], "train_p": .07, "train_noise": .11, "train_tasks": 60}
WINS = {"core_tsv": lambda i, k: i % 2 == 0 or i == 1, "sft": lambda i, k: i < 5, "distilled": lambda i, k: i < 4 + k, "top_p": lambda i, k: i % 2 == 0, "turns": lambda i, k: i < 7, "multi_grpo": lambda i, k: i % 3 == 0}


def compared(run, folder):
    "A comparison of two seeds around copies of a tiny run, with its rows' logs and trajectories."
    tasks = [f"retail_{i:02d}" for i in range(12)]
    grpo = [{"step": n, "reward": n / 6, "success": n / 8, "informative_share": .5, "completion_length": 40, "truncated_share": 0., "rollouts": 64, "tokens": 900, "seconds": 1., "refilled_groups": 1} for n in range(1, 6)]
    sft = [{"step": n, "epoch": n / 2, "loss": 2 / n, "accuracy": .8, "rollouts": 0, "tokens": 400, "seconds": .5, **({"rows": 30, "left_out": 1} if n == 1 else {}), **({"held_out_loss": 2.5 / n} if n % 2 == 0 else {})} for n in range(1, 9)]
    facts = lambda n: {"one": {"reverse_kl": 1 / n, "drift": n / 9, "reward": .5, "success": n / 9, "rollouts": 32}, "two": {"reverse_kl": n / 10, "drift": .1, "reward": .5, "success": .4, "rollouts": 32}}
    taught = [{"step": n, "reward": .5, "success": .5, "reverse_kl": .5, "drift": .2, "completion_length": 40, "truncated_share": 0., "rollouts": 64, "tokens": 900, "capabilities": facts(n), "loss": .1, "seconds": 1.} for n in range(1, 6)]
    for seed in (0, 1):
        place, parameters = folder/f"seed_{seed}", asdict(Parameters(seed=seed))
        shutil.copytree(run, place/"trace")
        write_json({"parameters": parameters, "stages": {}, "budget": {}}, place/"trace"/"manifest.json")
        card = place/"trace"/"adapters"/SKILL/"capability.json"
        write_json({**read_json(card), "metrics": GATE, "method": "grpo", "base": {"name": "pocket", "sha256": "abc123"}, "environments": {"ToolPrecision": "0123456789abcdef"}, "settings": {"steps": 10, "rank": 8}}, card)
        for name, records in {"multi_grpo": grpo, "sft": sft, "distilled": taught}.items(): log_lines(place/"rows"/name/"training_log.jsonl", records)
        write_json({"rank": 16, "norm": 2., "norms": [1., 1.], "cosine_to_sum": .9, "energy_kept": 1., "condition": 3., "density": None}, place/"rows"/"core_tsv"/"merge.json")
        for name, won in WINS.items(): write_trajectories([episode(name, t, k, won(i, k)) for i, t in enumerate(tasks) for k in range(2)], place/"trajectories"/f"{name}_test.jsonl")
        made = {name: {"adapters": {name: f"rows/{name}"}} for name in WINS}
        made["top_p"]["choices"] = {t: SKILL if i % 2 else None for i, t in enumerate(tasks)}
        made["turns"]["turns"] = {"refused": SKILL} if seed else {}
        made["routed:tfidf"] = {"trials": dict.fromkeys(tasks, "base"), "note": "12 tokens and 3 ms a request; right on 75% of the examples"}
        write_json({"parameters": parameters, "stages": {f"make {n}": {"name": f"make {n}", "key": "", "seconds": 1., "result": m} for n, m in made.items()}, "budget": {}}, place/"manifest.json")
        records = [charge(ledger_record(n, seed), "training", rollouts) for n, rollouts in {"routed": 3000, "core_tsv": 3000, "sft": 3000, "distilled": 5400, "base_again": 0}.items()]
        write_json({"seed": seed, "rows": [], "ledger": ledger_rows(records), "equal_budget": equal_budget(records, budget=3000), "notes": {"sft": "31 of 40 successes kept"}, "not_run": [{"method": "awm", "reason": "no data"}]}, place/"comparison.json")


def test_grpo_runs(run, tmp_path):
    out = run_notebook("grpo_runs", tmp_path/"3.ipynb", {"run": str(run)}, progress=None)
    text = shown(out)
    for part in (f"{SKILL} (10 steps)", "accepted", "0.866", "-2.645", "hold no intervals", "Only a comparison has them"): assert part in text, part
    assert figures(out) == 2 and quiet(out)


def test_grpo_runs_of_a_comparison(run, tmp_path):
    compared(run, tmp_path/"compare")
    out = run_notebook("grpo_runs", tmp_path/"3.ipynb", {"comparison": str(tmp_path/"compare")}, progress=None)
    text = shown(out)
    for part in (f"{SKILL} (10 steps)", "multi_grpo", "seed_1", "+30.0%", "<.001", "abc123", "ToolPrecision 01234567"): assert part in text, part
    assert figures(out) == 5 and quiet(out)


def test_routing_ablation(run, tmp_path):
    out = run_notebook("4_routing_ablation", tmp_path/"4.ipynb", {"run": str(run)}, progress=None)
    text = shown(out)
    for part in ("regret", "channel  80.0% right", "oracle (bound)", "doing nothing solves 1 of 12 tasks", "two equal runs", "pass@2", "No merge was played"): assert part in text, part
    assert figures(out) == 5 and quiet(out)


def test_routing_ablation_says_when_a_merge_is_as_good(run, tmp_path):
    compared(run, tmp_path/"compare")
    out = run_notebook("4_routing_ablation", tmp_path/"4.ipynb", {"comparison": str(tmp_path/"compare")}, progress=None)
    text = shown(out)
    for part in ("2 seed(s)", "The best of 1 merges (picked on these very tasks), core_tsv, solves 58.3%, routing 41.7%: +16.7%", "No advantage of routing over this merge is shown", "distilled: 80% more than the budget: its gain is overstated", "awm: not run, no data",
                 "seed_0: no event changes", f"seed_1: after refused: {SKILL}", "0.75", "union of 2"): assert part in text, part
    assert figures(out) == 5 and quiet(out)


def test_sft_and_distillation(run, tmp_path):
    compared(run, tmp_path/"compare")
    out = run_notebook("5_sft_and_distillation", tmp_path/"5.ipynb", {"comparison": str(tmp_path/"compare")}, progress=None)
    text = shown(out)
    for part in ("31 of 40 successes kept", "seed_1: nearer to one: 1.000 to 0.200", "NOT nearer to two", "distilled: 5,400 rollouts of 3,000: 80% more than the budget", "sft against distilled"): assert part in text, part
    assert figures(out) == 5 and quiet(out)


@pytest.mark.parametrize("name, parameter", [("3_grpo_runs", "comparison"), ("4_routing_ablation", "comparison"), ("5_sft_and_distillation", "comparison")])
def test_a_missing_comparison_names_the_command_that_makes_it(tmp_path, name, parameter):
    source = [c["source"] for c in cells(experiments_folder()/f"{name}.ipynb")]
    place = {}
    with pytest.raises(InputError, match="no comparison here; `trace-nb compare --out"):
        for cell in source:
            exec("".join(line for line in cell if not line.startswith("%")), place)
            if "comparison" in place: place[parameter] = str(tmp_path/"nowhere")


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
