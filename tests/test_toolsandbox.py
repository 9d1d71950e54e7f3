"The adapter on a stand-in for ToolSandbox (`toolsandbox_tree`); the tests of the real tree skip where none is named."
import json, os
from pathlib import Path

import pytest

from trace_nb.core.environment import Episode, as_message, replay
from trace_nb.core.policy import load_policy
from trace_nb.core.rollout import rollout
from trace_nb.core.trajectory import InputError
from trace_nb.targets import toolsandbox as target
from trace_nb.targets.toolsandbox import find_tree, scenario_class, toolsandbox_tasks
from trace_nb.targets.users import SCRIPT, STOP, User

TREE = Path(__file__).parent/"toolsandbox_tree"
named = os.environ.get(target.VARIABLE)
needs_tree = pytest.mark.skipif(not named, reason=f"ToolSandbox is not on PyPI; set {target.VARIABLE} to a clone to run this")


@pytest.fixture(autouse=True)
def stand_in(monkeypatch, request):
    if "real" not in request.node.name: monkeypatch.setenv(target.VARIABLE, str(TREE))


@pytest.fixture(scope="module", autouse=True)
def no_process_left():
    yield
    for w in target._workers: w.stop()


def call(name, **arguments): return {"name": name, "arguments": arguments}
def cls(name, user=SCRIPT): return scenario_class(find_tree(), name, user)
def tool_texts(t): return [m["content"] for m in t.messages if m["role"] == "tool"]


def many(*calls): return {"role": "assistant", "content": None, "tool_calls": [{"id": f"0-{i}", "type": "function", "function": c} for i, c in enumerate(calls)]}


def test_without_a_tree_one_line_says_what_to_do(monkeypatch, tmp_path):
    monkeypatch.delenv(target.VARIABLE)
    with pytest.raises(InputError, match="set TRACE_NB_TOOLSANDBOX to the folder"): toolsandbox_tasks()
    (tmp_path/"tool_sandbox"/"scenarios").mkdir(parents=True); (tmp_path/"tool_sandbox"/"__init__.py").write_text("import polars_of_old")
    with pytest.raises(InputError, match=r"does not start \(ToolSandbox: ModuleNotFoundError.*polars_of_old"): toolsandbox_tasks(tree=tmp_path)


def test_base_scenarios_by_rule_and_whole_families():
    tasks = {t.task_id: t for t in toolsandbox_tasks()}
    assert list(tasks) == [f"toolsandbox_{n}" for n in ("wifi_off", "keep_note", "keep_note_alt", "find_note_insufficient_information")]
    assert tasks["toolsandbox_keep_note"].split == tasks["toolsandbox_keep_note_alt"].split
    assert {t.task_id for t in toolsandbox_tasks("train")} | {t.task_id for t in toolsandbox_tasks("test")} == set(tasks)


def test_a_perfect_episode_and_what_it_depends_on():
    t = replay(cls("wifi_off"), 0)
    assert (t.reward, t.termination, t.messages[-1]["content"], tool_texts(t)) == (1.0, "done", STOP, ["None"])
    assert [t.messages[0]["content"], t.messages[1]["content"]] == ["Do as asked.", "Turn wifi off."]
    assert t.metadata["user"] == "scripted" and len(t.metadata["tree"]) == 64 and t.metadata["max_steps"] == 12 and str(TREE) not in json.dumps(t.to_dict())


def test_time_and_ids_stand_still_and_no_address_is_left():
    steps = [call("add_note", text="milk"), call("notes"), call("drop", id="x")]
    one, two, other = replay(cls("keep_note"), 0, steps), replay(cls("keep_note"), 0, steps), replay(cls("keep_note"), 1, steps)
    assert one.to_dict() == two.to_dict() and tool_texts(one)[0] != tool_texts(other)[0]
    assert f"'at': {target.NOW}" in tool_texts(one)[1] and tool_texts(one)[2] == "LookupError: No entry matching <object object at 0x0> found"


def test_another_process_gives_the_same_bytes():
    steps = [call("add_note", text="milk"), call("notes")]
    first = replay(cls("keep_note"), 3, steps)
    for w in target._workers: w.stop()
    assert replay(cls("keep_note"), 3, steps).to_dict() == first.to_dict()


def test_interleaved_episodes_do_not_see_each_other():
    a, b = Episode(cls("keep_note"), 0), Episode(cls("keep_note"), 1)
    steps = [(a, call("add_note", text="milk")), (b, call("add_note", text="tea")), (a, call("notes")), (b, call("notes")), (b, call("set_wifi_status", on=False)), (a, call("set_wifi_status", on=False))]
    answers = [episode.step(as_message(step, i))[0]["content"] for i, (episode, step) in enumerate(steps)]
    assert "milk" in answers[2] and "tea" not in answers[2] and "tea" in answers[3] and answers[4] == answers[5] == "None"
    assert (a.environment.get_reward(), b.environment.get_reward(), a.environment._worker is b.environment._worker) == (1.0, 0.0, True)


def test_what_would_kill_a_scenario_is_an_error_result():
    episode = Episode(cls("wifi_off"), 0)
    wrong = [call("fly"), {"name": "set_wifi_status", "arguments": "{on"}, call("set_wifi_status", on="yes"), call("end_conversation"), call("notes")]
    answers = [m["content"] for m in episode.step(many(*wrong))]
    assert answers[:2] == ["Error: Tool 'fly' not found.", "Error: The arguments of set_wifi_status are not a JSON object."] and answers[2].startswith("TypeError")
    assert answers[3] == "Error: Tool 'end_conversation' not found." and answers[4] == "Error: At most 4 calls at a time; this one was not run."
    assert episode.termination is None


def test_parallel_results_are_matched_to_their_calls_though_they_return_in_another_order():
    episode = Episode(cls("wifi_off"), 0)
    answers = episode.step(many(call("add_note", text="a"), call("set_wifi_status", on=False), call("notes")))
    assert [m["tool_call_id"] for m in answers] == ["0-0", "0-1", "0-2"] and [m["name"] for m in answers] == ["add_note", "set_wifi_status", "notes"]
    answers = episode.step(many(call("notes"), call("set_wifi_status", on=False)))
    assert "'a'" in answers[0]["content"] and answers[1]["content"] == "ValueError: wifi already disabled"


def test_limits_and_users():
    long = replay(cls("wifi_off"), 0, [call("notes")] * 9)
    assert (long.termination, long.metadata["ended_by"], len(tool_texts(long))) == ("max_turns", "max_messages", 6)
    heard = []
    def speak(scenario, messages): heard.append((scenario.prompt, [m["content"] for m in messages])); return "end_conversation()"
    left = replay(cls("wifi_off", User("talker", speak)), 0, ["Which wifi?"])
    assert (left.termination, left.metadata["user"]) == ("done", "talker")
    assert heard[0][0].startswith("You want this: Turn wifi off.") and heard[0][1] == ["An example.", "Turn wifi off.", "Which wifi?"]
    mute = replay(cls("wifi_off", User("mute", lambda s, m: "")), 0, ["Which wifi?"])
    assert (mute.termination, mute.success) == ("user_error", False)


def test_scenarios_without_information_are_told_apart():
    from trace_nb.evaluate.evaluate import evaluation_frame, results_table
    import pandas as pd
    tasks = toolsandbox_tasks(user="scripted")
    played = rollout(load_policy("do_nothing"), [t.environment for t in tasks], [t.seed for t in tasks], task_ids=[t.task_id for t in tasks])
    frame = evaluation_frame(played, "do_nothing", "all", "toolsandbox")
    table = results_table(pd.concat([frame, target.without_insufficient_information(frame, tasks)])).set_index("target")
    assert (table.rate["toolsandbox"], table.rate["toolsandbox with enough information"]) == (.25, 0)
    assert [t.parts["insufficient"] for t in played] == [0, 0, 0, 1]


def test_a_dead_process_is_a_fault_of_the_environment():
    episode = Episode(cls("wifi_off"), 0)
    episode.environment._worker.stop()
    episode.step(as_message(call("notes")))
    assert episode.termination == "environment_error" and "the process ended" in episode.fault
    assert replay(cls("wifi_off"), 0).reward == 1.0


@needs_tree
def test_real_tree_doing_nothing_is_worth_what_was_measured():
    tasks = toolsandbox_tasks(user=User("leaves", lambda scenario, messages: STOP))
    played = rollout(load_policy("do_nothing"), [t.environment for t in tasks], [t.seed for t in tasks], task_ids=[t.task_id for t in tasks])
    rewards = [t.reward for t in played]
    assert (len(rewards), sum(r == 1 for r in rewards), round(sum(rewards) / len(rewards), 4)) == (129, 26, .2099)


@needs_tree
def test_real_tree_repeats_and_its_first_solution_is_perfect():
    real = scenario_class(find_tree(), "wifi_off", SCRIPT)
    assert replay(real, 0).to_dict() == replay(real, 0).to_dict() and replay(real, 0).reward == 1.0
