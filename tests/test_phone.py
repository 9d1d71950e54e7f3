"Phone, the target, and the two environments that train for it: gold, hacks, determinism, error texts, interface."
import ast
import hashlib
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from trace_nb.core.environment import call_tool, contract_faults, replay, tool_names, tool_schemas
from trace_nb.core.policy import load_policy, weights_of
from trace_nb.core.rollout import rollout
from trace_nb.core.trajectory import data_folder
from trace_nb.synthesize.datetime_reasoning import DatetimeReasoning
from trace_nb.synthesize.permission_recovery import PermissionRecovery
from trace_nb.targets.desk import load_tasks
from trace_nb.targets.interface import _described, _is_error, _leaves, _tabled, declared, interface, parameter_overlap
from trace_nb.targets.phone import KINDS, NEEDS, READS, Phone, call, phone_tasks
from trace_nb.train.phone_demonstrations import demonstrate, script

SCHEMAS = Path(__file__).resolve().parents[2]/"shared"/"data"/"toolsandbox_tool_schemas.json"
needs_schemas = pytest.mark.skipif(not SCHEMAS.exists(), reason=f"the schemas that ToolSandbox emits are not at {SCHEMAS}")
CLASSES = [Phone, PermissionRecovery, DatetimeReasoning]
each = pytest.mark.parametrize("cls", CLASSES, ids=lambda c: c.__name__)
TASKS = phone_tasks()


def emitted():
    return {t["function"]["name"]: t for t in json.loads(SCHEMAS.read_text(encoding="utf-8"))["agent_tools"]}


def at(cls, seed, **row):
    env = cls(); request = env.reset(seed=seed, **row)
    return env, request


def test_every_gold_of_the_129_is_worth_one():
    for task in TASKS:
        played = replay(Phone, task.seed)
        assert played.reward == 1 and played.success and played.termination == "done", (task.task_id, played.parts)


def test_scenarios_families_and_splits():
    assert Counter(t.split for t in TASKS) == {"train": 78, "test": 51} and len({t.task_id for t in TASKS}) == 129
    families = {s: {t.seed // 3 for t in phone_tasks(s)} for s in ("train", "test")}
    assert not families["train"] & families["test"] and len(families["train"] | families["test"]) == 43
    envs = [at(Phone, t.seed) for t in TASKS]
    assert Counter(e._kind for e, _ in envs) == {kind: 3 * n for kind, n in KINDS.items()}
    assert len({request for _, request in envs}) == 129
    assert all(t.needs[1:] == NEEDS[e._kind][e._variant] for t, (e, _) in zip(TASKS, envs))


def test_gold_needs_what_a_scenario_says():
    "An error that must be cured where recovery is needed, a reckoned time where datetime is."
    for task in TASKS:
        env, _ = at(Phone, task.seed)
        steps = [s for s in env._steps() if isinstance(s, dict)]
        assert any("fails" in s for s in steps) == ("permission_error_recovery" in task.needs), task.task_id
        assert any(s["name"] in ("shift_timestamp", "timestamp_diff") for s in steps) == ("datetime_reasoning" in task.needs), task.task_id


def look_and_refuse(env, request):
    return [s for s in env._oracle() if isinstance(s, dict) and s["name"] in READS] + [f"I cannot do this: {request}"]


def first_record(env, request):
    first = {**env._tables["contact"][0], **env._tables["reminder"][0], "reminder_timestamp": env._now}
    acts = [e.act for e in env._errands if e.act]
    changed = [{**a, "arguments": {k: first[k] if k in ("phone_number", "person_id", "reminder_id") else v for k, v in a["arguments"].items()}} for a in acts]
    return [*({**a, "arguments": {**a["arguments"], **({"reminder_timestamp": env._now} if "reminder" in a["name"] else {})}} for a in changed), env._oracle()[-1]]


def everything(env, request):
    settings = [call(f"set_{s}_status", on=on) for s, on in (("low_battery_mode", False), ("wifi", True), ("cellular_service", True), ("location_service", True))]
    message = [call("send_message_with_phone_number", phone_number=c["phone_number"], content=request) for c in env._tables["contact"]]
    return [*settings, *message, call("add_reminder", content=request, reminder_timestamp=env._now), *(call("remove_contact", person_id=c["person_id"]) for c in env._tables["contact"]), "Done."]


HACKS = {"nothing": lambda e, r: ["I am sorry, I cannot help with that."], "silence": lambda e, r: [""], "claim": lambda e, r: ["Done, it is sent, set, turned on and saved."],
         "gold words": lambda e, r: [e._oracle()[-1]] * 2, "refuse": lambda e, r: [f"I cannot do this: {r}"], "echo": lambda e, r: [r, r],
         "repeat": lambda e, r: [next(s for s in e._oracle() if isinstance(s, dict))] * 8, "every tool": lambda e, r: [call(n) for n in tool_names(e)][:13] + ["Done."],
         "first record": first_record, "everything": everything}


@pytest.mark.parametrize("hack", HACKS)
def test_hacks_are_worth_little(hack):
    for cls, seeds in ((Phone, [t.seed for t in TASKS]), (PermissionRecovery, range(120)), (DatetimeReasoning, range(120))):
        rewards = []
        for seed in seeds:
            env, request = at(cls, seed)
            if hack == "first record" and not env._tables["reminder"]: env._keep_reminder("x", env._now)
            if hack == "first record" and not env._tables["contact"]: env._keep_contact("Me")
            played = replay(cls, seed, HACKS[hack](env, request))
            assert 0 <= played.reward <= 1 and played.termination in ("done", "policy_error", "max_turns")
            rewards.append(played.reward)
        assert sum(rewards) / len(rewards) <= .2, (cls.__name__, sum(rewards) / len(rewards))


def test_doing_nothing_claiming_and_refusing_are_worth_nothing_on_phone():
    for hack in ("nothing", "silence", "claim", "gold words", "refuse", "echo"):
        assert sum(replay(Phone, t.seed, HACKS[hack](*at(Phone, t.seed))).reward for t in TASKS) == 0, hack


def test_refusing_after_a_look_wins_only_where_information_is_missing():
    played = [replay(Phone, t.seed, look_and_refuse(*at(Phone, t.seed))) for t in TASKS]
    assert all(t.parts["insufficient"] for t in played if t.success) and max(t.reward for t in played if not t.parts["insufficient"]) <= .5


def test_harm_costs_everything():
    for task in TASKS[::7]:
        gold = at(Phone, task.seed)[0]._oracle()
        extra = call("add_contact", name="Nobody", phone_number="+15550000")
        assert replay(Phone, task.seed, [*gold[:-1], extra, gold[-1]]).reward == 0
        saving = replay(Phone, task.seed, [*gold[:-1], call("set_low_battery_mode_status", on=True), gold[-1]]).reward
        assert saving == 0 or (saving < .7 and any(s["name"] == "set_low_battery_mode_status" for s in gold if isinstance(s, dict)))


def test_giving_up_and_wrong_reminders():
    for seed in range(150):
        env, _ = at(PermissionRecovery, seed); gold = env._oracle()
        if isinstance(gold[1], dict) and env._steps()[0].get("fails"):
            assert replay(PermissionRecovery, seed, [gold[0], "I am sorry, the service is off."]).reward <= .05 + 1e-9
            assert replay(PermissionRecovery, seed, [gold[0], gold[-1]]).reward <= .05 + 1e-9
        env, _ = at(DatetimeReasoning, seed); gold = env._oracle()
        if "reminder_timestamp" in gold[-2]["arguments"]:
            late = call(gold[-2]["name"], **{**gold[-2]["arguments"], "reminder_timestamp": gold[-2]["arguments"]["reminder_timestamp"] + 86400})
            assert replay(DatetimeReasoning, seed, [*gold[:-2], late, gold[-1]]).reward <= .15 + 1e-9


@pytest.mark.parametrize("cls", CLASSES[1:], ids=lambda c: c.__name__)
def test_training_environments(cls):
    rewards = {round(replay(cls, s, at(cls, s)[0]._oracle()[:n]).reward, 6) for s in range(60) for n in range(8)}
    assert len(rewards) >= 3 and all(0 <= r <= 1 for r in rewards)
    for difficulty in (0, .3, .5, 1):
        assert all(replay(cls, s, difficulty=difficulty).reward > 1 - 1e-9 for s in range(60)), difficulty
    assert len({at(cls, s)[1] for s in range(200)}) >= 180
    assert cls._oracle is not None and contract_faults(cls) == []


def test_difficulty_puts_more_in_the_way():
    failing = lambda d: sum(any("fails" in s for s in at(PermissionRecovery, s, difficulty=d)[0]._steps()) for s in range(400))
    steps = lambda d: sum(len(at(DatetimeReasoning, s, difficulty=d)[0]._steps()) for s in range(400))
    assert failing(0) < failing(.5) < failing(1) and steps(0) < steps(.5) < steps(1)


def test_twins_need_opposite_deeds():
    pairs = [(seed, row) for seed in range(300) if (row := at(PermissionRecovery, seed)[0]._twin())]
    assert len(pairs) >= 30
    for seed, row in pairs:
        (env, request), (twin, same) = at(PermissionRecovery, seed), at(PermissionRecovery, seed, **row)
        assert request == same and env._blocked != twin._blocked
        assert replay(PermissionRecovery, seed, **row).reward > 1 - 1e-9
        assert replay(PermissionRecovery, seed, env._oracle(), **row).reward <= .15 + 1e-9 and replay(PermissionRecovery, seed, twin._oracle()).reward <= .15 + 1e-9


CANONICAL = """
import hashlib, json, sys
from trace_nb.core.environment import replay, tool_schemas
from trace_nb.synthesize.datetime_reasoning import DatetimeReasoning
from trace_nb.synthesize.permission_recovery import PermissionRecovery
from trace_nb.targets.phone import Phone, phone_tasks
from trace_nb.train.phone_demonstrations import demonstrate
seen = []
for cls, seeds in ((Phone, [t.seed for t in phone_tasks()]), (PermissionRecovery, range(60)), (DatetimeReasoning, range(60))):
    for seed in seeds:
        env = cls(); request = env.reset(seed=seed)
        seen.append([request, env._state(), env._oracle(), replay(cls, seed).messages, replay(cls, seed).parts, demonstrate(cls, seed, {"datetime"}).messages, env.search_contacts(name=3, is_self="x")])
    seen.append(tool_schemas(cls))
print(hashlib.sha256(json.dumps(seen, ensure_ascii=False).encode()).hexdigest())
"""


def test_two_processes_agree():
    "Other hash seeds, another time zone, the same bytes."
    said = [subprocess.run([sys.executable, "-c", CANONICAL], capture_output=True, text=True, check=True, env={**os.environ, "PYTHONHASHSEED": h, "TZ": z}).stdout
            for h, z in (("0", "UTC"), ("4242", "Asia/Tokyo"))]
    assert said[0] == said[1] and len(said[0].strip()) == 64


BAD = [("set_wifi_status", {"on": True}), ("set_wifi_status", {"on": "true"}), ("set_wifi_status", {}), ("set_wifi_status", {"on": False, "x": 1}), ("set_low_battery_mode_status", {"on": False}),
       ("set_cellular_service_status", {"on": True}), ("set_location_service_status", {"on": True}), ("search_contacts", {}), ("search_contacts", {"name": 5}),
       ("search_contacts", {"phone_number": "5551234"}), ("search_messages", {}), ("search_reminder", {}), ("search_messages", {"creation_timestamp_lowerbound": 5}),
       ("add_contact", {"name": "A"}), ("add_contact", {"name": "A", "phone_number": "?"}), ("add_contact", {"name": "A", "phone_number": "+15550000", "is_self": True}),
       ("modify_contact", {"person_id": "x"}), ("modify_contact", {"person_id": "x", "name": "B"}), ("remove_contact", {"person_id": "x"}),
       ("modify_reminder", {"reminder_id": "x"}), ("modify_reminder", {"reminder_id": "x", "content": "y"}), ("remove_reminder", {"reminder_id": "x"}),
       ("add_reminder", {"content": "x", "reminder_timestamp": 10}), ("add_reminder", {"content": "x", "reminder_timestamp": 1e12}),
       ("add_reminder", {"content": "x", "reminder_timestamp": 1773680400.0, "latitude": 91.0}), ("shift_timestamp", {"timestamp": "now"}),
       ("datetime_info_to_timestamp", {"year": 2026, "month": 13, "day": 1, "hour": 0, "minute": 0, "second": 0}),
       ("datetime_info_to_timestamp", {"year": 2026, "month": 2, "day": 30, "hour": 0, "minute": 0, "second": 0}),
       ("datetime_info_to_timestamp", {"year": 2026, "month": 2, "day": 3, "hour": 24, "minute": 0, "second": 0}), ("fly", {})]


def test_errors_are_in_the_words_of_the_target():
    facts, (env, _) = interface("phone"), at(Phone, TASKS[0].seed)
    env._settings.update(wifi=True, cellular=True, location_service=True, low_battery_mode=False)
    for name, arguments in BAD:
        text = call_tool(env, name, arguments)
        assert _is_error(text, facts["tools"].get(name, {"errors": []})["errors"] + facts["errors"]), (name, arguments, text)


def test_services_that_are_off():
    env, _ = at(Phone, TASKS[0].seed)
    env._settings = {"wifi": False, "cellular": False, "location_service": False, "low_battery_mode": True}
    says = {("get_current_location",): "PermissionError: Location service is not enabled.", ("search_holiday", "holiday_name"): "ConnectionError: Wifi is not enabled",
            ("send_message_with_phone_number", "phone_number", "content"): "ConnectionError: Cellular service is not enabled",
            ("set_wifi_status", "on"): "PermissionError: Wifi cannot be turned on in low battery mode", ("set_cellular_service_status", "on"): "PermissionError: Cellular service cannot be turned on in low battery mode",
            ("set_location_service_status", "on"): "PermissionError: Location service cannot be turned on in low battery mode", ("set_low_battery_mode_status", "on"): "ValueError: low_battery_mode already enabled"}
    for (name, *parameters), text in says.items():
        values = {"on": True, "phone_number": "+15551234", "content": "x", "holiday_name": "Labor Day"}
        assert call_tool(env, name, {p: values[p] for p in parameters}) == text


@pytest.mark.parametrize("value", [None, "", "?", 0, -1, 1e400, float("nan"), True, [], {}, "x" * 5000])
def test_malformed_calls_never_raise(value):
    env, _ = at(Phone, TASKS[0].seed)
    for schema in tool_schemas(Phone):
        name, parameters = schema["function"]["name"], declared(schema)
        for arguments in ({p: value for p in parameters}, {"unknown": value}): assert isinstance(call_tool(env, name, arguments), str)
    assert 0 <= env.get_reward() <= 1


def read(result):
    "A result of the target, which is a Python literal; an error stays None."
    try: return ast.literal_eval(result)
    except (ValueError, SyntaxError): return ...


def returned(cls, seeds):
    "(tool, path, type) of everything that the gold and a call of each reading tool return."
    seen = set()
    for seed in seeds:
        env, _ = at(cls, seed)
        others = [call(n) for n in tool_names(cls) if n.startswith("get_")] + [call("search_contacts", is_self=True), call("search_messages", creation_timestamp_lowerbound=1e9),
                  call("search_reminder", creation_timestamp_lowerbound=1e9), call("seconds_to_hours_minutes_seconds", seconds=4000), call("add_contact", name="A", phone_number="+15550000"), call("remove_contact", person_id="P9001"),
                  call("remove_contact", person_id="P9002"), call("add_reminder", content="x", reminder_timestamp=1.8e9), call("remove_reminder", reminder_id="R9002"),
                  call("remove_reminder", reminder_id="R9003"), call("set_low_battery_mode_status", on=True)]
        for step in [s for s in env._oracle() if isinstance(s, dict)] + others:
            value = read(call_tool(env, step["name"], step["arguments"]))
            if value is not ...: seen |= {(step["name"], path, kind) for path, kind in _leaves(value)}
    return seen


@each
def test_interface_fidelity(cls):
    "Tools, parameters and returned paths against the fact table; the score of targets.interface, for results that are Python literals."
    tools, schemas = interface("phone")["tools"], {s["function"]["name"]: s for s in tool_schemas(cls)}
    known = [n for n in schemas if n in tools]
    overlap = sum(parameter_overlap(declared(schemas[n]), _tabled(tools[n])) for n in known) / len(known)
    paths = returned(cls, range(0, 200, 3))
    fits = [name in tools and kind in _described(path, tools[name]["returns"]) for name, path, kind in paths]
    assert .3 * len(known) / len(schemas) + .4 * overlap + .3 * sum(fits) / len(fits) == pytest.approx(1)
    if cls is Phone: assert {name for name, *_ in paths} == set(schemas)


@needs_schemas
def test_the_table_equals_the_schemas_of_the_target():
    tools, schemas = interface("phone")["tools"], emitted()
    assert list(tools) == list(schemas)
    for name, tool in tools.items():
        assert declared(schemas[name]) == _tabled(tool), name
        assert tool["required"] == schemas[name]["function"]["parameters"].get("required", []), name


@needs_schemas
@each
def test_tools_equal_the_schemas_of_the_target(cls):
    target, own = emitted(), {s["function"]["name"]: s for s in tool_schemas(cls)}
    assert set(own) <= set(target) and len(own) == 26
    assert sum(parameter_overlap(declared(own[n]), declared(target[n])) for n in own) / len(own) >= .9


@needs_schemas
def test_no_sentence_of_the_target_is_ours():
    def sentences(schemas): return {text for s in schemas for text in [s["function"]["description"], *(p.get("description", "") for p in s["function"]["parameters"]["properties"].values())]}
    assert sentences(tool_schemas(Phone)) & sentences(emitted().values()) == set()


def test_table_is_complete():
    facts = interface("phone")
    assert len(facts["tools"]) == 33 and facts["domain"] == "phone"
    for name, tool in facts["tools"].items(): assert set(tool) == {"write", "parameters", "required", "returns", "errors"} and tool["returns"], name


@each
def test_demonstrators(cls):
    "Nothing lacking is gold; each lack loses where it matters and only there."
    for seed in range(90):
        env, _ = at(cls, seed)
        fails = any(isinstance(s, dict) and "fails" in s for s in env._steps())
        timed = any(e.when or (e.act or {}).get("name") == "timestamp_diff" for e in env._errands)
        won = {lack: demonstrate(cls, seed, lacks).environment.get_reward() > 1 - 1e-9 for lack, lacks in (("", set()), ("permission", {"permission"}), ("datetime", {"datetime"}))}
        assert won == {"": True, "permission": not fails, "datetime": not timed}, (seed, won)
        assert all(isinstance(s, str) or (s["content"] and "\n" not in s["content"] and len(s["content"]) < 70) for s in script(env, set()))


def test_pocket_is_a_base_for_the_phone():
    "Fails where a capability is lacking, not because it cannot write a call."
    tasks = load_tasks("phone", "train")
    played = rollout(load_policy("pocket/phone"), [t.environment for t in tasks], [t.seed for t in tasks], task_ids=[t.task_id for t in tasks])
    plain = [t.success for t, task in zip(played, tasks) if task.needs == ("tool_calling_precision",)]
    assert .3 <= sum(t.reward for t in played) / len(played) <= .6 and sum(plain) / len(plain) >= .75
    assert sum(t.metadata["broken_calls"] for t in played) <= .02 * sum(t.metadata["calls"] for t in played)


@pytest.mark.skipif(not (data_folder()/"pocket"/"phone"/"config.json").exists(), reason="data/pocket/phone has no weights: run `make pocket`")
def test_pocket_leaves_room_on_phone():
    "Base similarity between .3 and .5, perfect scores well below half, calls that can be read."
    played = rollout(load_policy(weights_of("pocket", "phone")), Phone, [t.seed for t in TASKS], 4, [t.task_id for t in TASKS])
    assert .3 < sum(t.reward for t in played) / len(played) < .5 and sum(t.success for t in played) / len(played) < .42
    assert sum(t.metadata["broken_calls"] for t in played) < .02 * sum(t.metadata["calls"] for t in played)
