"The rule analyst on whole worlds: a real log, desk and phone played by scripts, and the reviewed sample."
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from trace_nb.core.environment import finish, replay
from trace_nb.core.trajectory import InputError, calls, data_folder, read_json
from trace_nb.diagnose.labeling import CANDIDATES, LABELS, label_rows, label_runs
from trace_nb.diagnose.logs import read_log
from trace_nb.diagnose.rules import PHONE_TOOLS, case_of, evidence_text, label, review_table
from trace_nb.diagnose.selection import select
from trace_nb.targets.desk import desk_tasks
from trace_nb.targets.phone import Phone
from trace_nb.train.pocket import demonstrate, draw_lacks

REAL_LOG = Path(__file__).resolve().parents[2]/"shared"/"data"/"tau_bench_gpt4o_airline.json.xz"
needs_log = pytest.mark.skipif(not REAL_LOG.exists(), reason=f"the real tau-bench log is not at {REAL_LOG}")
REVIEWED = read_json(data_folder()/"diagnose"/"reviewed_pairs.json")


@pytest.fixture(scope="module")
def real():
    return read_log(REAL_LOG)[0]


def counted(trajectories, capability):
    return Counter(label(t)[capability].label for t in trajectories)


# --- evidence

@needs_log
def test_every_label_but_na_points_at_text(real):
    texts = {t.id: [evidence_text(m) for m in t.messages] for t in real}
    for row in label_rows(real):
        assert (row["span"] is None) == (row["label"] == "NA")
        if row["span"]:
            i, start, end = row["span"]
            assert 0 <= start < end <= len(texts[row["id"]][i])
    assert json.loads(json.dumps(label_rows(real[:2]))) == label_rows(real[:2])


@needs_log
def test_a_case_knows_nothing_of_the_outcome(real):
    for t in real[:20]:
        told = replace(t, success=not t.success, reward=1 - t.reward, parts={"reward": 1 - t.reward}, metadata=t.metadata | {"reward": 1.0, "note": "passed"})
        assert case_of(told) == case_of(t)


# --- desk

def desk(lacks_of):
    "Each train task of desk, four times, by the demonstrator that lacks what `lacks_of(n)` says."
    plays = [(task, trial, lacks_of(4 * n + trial)) for n, task in enumerate(desk_tasks("train")) for trial in range(4)]
    gold = lambda episode: {"gold": [step for step in episode.environment._oracle() if isinstance(step, dict)]}      # as `rollout` writes it
    return [finish(e := demonstrate(task.environment, task.seed, lacks), task.task_id, trial, "script", f"desk:{task.domain}", gold(e)) for task, trial, lacks in plays]


LACKED = {"multi_step_task_completion", "precondition_verification", "structured_data_reasoning", "tool_calling_precision"}


def test_desk_gold_lacks_nothing():
    played = desk(lambda n: set())
    assert all(t.success for t in played)
    kept = [t for t in played if not any(m["role"] == "user" and "after all" in m["content"] for m in t.messages)]
    assert .9 * len(played) < len(kept) < len(played)       # the rules do not know that a user may change their mind
    assert {row["label"] for row in label_rows(kept)} == {"PRESENT", "NA"}


def test_desk_selection_finds_what_the_demonstrator_lacks():
    found = select(label_runs(desk(draw_lacks)))["capabilities"]
    assert {e["name"] for e in found if e["selected"]} == LACKED
    assert {e["name"] for e in found if not e["selected"]} == set(CANDIDATES) - LACKED


# --- phone

SEEDS = range(90)


def played(change=lambda steps, episode: steps):
    "Phone's gold episodes, changed; None stands for an episode that the change does not touch."
    found = {}
    for seed in SEEDS:
        gold = replay(Phone, seed)
        env = Phone(); env.reset(seed=seed)
        steps = change(env._oracle(), gold)
        if steps is not None: found[seed] = replay(Phone, seed, steps)
    return found


def gives_up(steps, gold):
    "Stop with an apology at the first call that fails."
    failed = next((n for n, call in enumerate(calls(gold)) if call.error), None)
    if failed is None: return None
    nth = [n for n, step in enumerate(steps) if isinstance(step, dict)][failed]
    return [*steps[:nth + 1], "Sorry, that did not work."]


def guesses_the_time(steps, gold):
    asked = [s for s in steps if isinstance(s, dict) and s["name"] == "get_current_timestamp"]
    reminders = any(isinstance(s, dict) and "reminder_timestamp" in s["arguments"] for s in steps)
    return [s for s in steps if not (isinstance(s, dict) and s["name"] in ("get_current_timestamp", "timestamp_to_datetime_info"))] if asked and reminders else None


def is_late(steps, gold):
    late = lambda s: {**s, "arguments": {**s["arguments"], "reminder_timestamp": s["arguments"]["reminder_timestamp"] + 5 * 3600}}
    touched = [late(s) if isinstance(s, dict) and "reminder_timestamp" in s["arguments"] else s for s in steps]
    return touched if touched != steps else None


def test_phone_gold_lacks_nothing():
    gold = list(played().values())
    assert all(t.success for t in gold)
    assert {row["label"] for row in label_rows([replace(t, id=f"phone/{n}/0") for n, t in enumerate(gold)])} == {"PRESENT", "NA"}
    relevant = ("permission_error_recovery", "datetime_reasoning", "structured_data_reasoning", "precondition_verification", "multi_step_task_completion")
    assert all(counted(gold, c)["PRESENT"] > 20 for c in relevant)


@pytest.mark.parametrize("change, capability, caught", [(gives_up, "permission_error_recovery", 1), (guesses_the_time, "datetime_reasoning", 1),
                                                        (is_late, "datetime_reasoning", .9), (lambda steps, gold: ["I cannot help with that."], "early_termination", .9)])
def test_phone_planted_lacks_are_caught(change, capability, caught):
    found = counted(played(change).values(), capability)
    assert found.total() > 10 and found["LACKING"] >= caught * found.total()


def test_phone_tools_are_those_of_the_interface():
    table = read_json(data_folder()/"interfaces"/"phone.json")["tools"]
    assert PHONE_TOOLS == (set(table) if isinstance(table, dict) else {tool["name"] for tool in table})


# --- the reviewed sample

def test_reviewed_pairs_are_whole():
    pairs = REVIEWED["pairs"]
    assert len({(p["id"], p["capability"]) for p in pairs}) == len(pairs)
    assert sum(p["label"] in LABELS for p in pairs) >= 60 and {p["capability"] for p in pairs} == set(CANDIDATES)
    for p in pairs: assert p["label"] in (*LABELS, "UNCLEAR") and p["drawn_as"] in LABELS and p["reason"]
    drawn = Counter((p["capability"], p["drawn_as"]) for p in pairs)
    for capability, sizes in REVIEWED["strata"].items():
        assert sum(sizes.values()) == 200 and all(drawn[capability, kind] <= size for kind, size in sizes.items())


@needs_log
def test_review_of_the_rules(real):
    table = review_table(label_rows(real), REVIEWED).set_index("capability")
    assert set(table.index) == {*CANDIDATES, "all"} and table.loc["all", "pairs"] == sum(p["label"] in LABELS for p in REVIEWED["pairs"])
    assert table.loc["all", "precision"] > .75 and table.loc["all", "recall"] > .55
    assert ((table.precision_low <= table.precision + 1e-9) & (table.precision <= table.precision_high + 1e-9)).all()


def test_a_review_of_another_log_is_refused(tmp_path):
    with pytest.raises(InputError, match="reviewed, but not labelled") as e: review_table([], REVIEWED)
    assert "\n" not in str(e.value)
