"""Any log in, nothing lost: real files, every format, damaged input, and memory."""
import gzip, json, lzma, math, random, subprocess, sys, types
from dataclasses import replace
from pathlib import Path

import pytest

from test_diagnose import conversation
from trace_nb.core.trajectory import InputError, read_trajectories, write_trajectories
from trace_nb.diagnose.logs import export_log, import_log, read_log

SHARED = Path(__file__).resolve().parents[2]/"shared"/"data"
REAL = {"tau_bench_gpt4o_airline.json.xz": (200, 84), "tau2_gold_replay_airline.json": (5, 4), "tau2_gold_replay_retail.json": (5, 4)}
needs_logs = pytest.mark.skipif(not all((SHARED/name).exists() for name in REAL), reason=f"the real logs are not in {SHARED}")


def refusal(*args, **options):
    "The one line with which an import is refused; None when it is not."
    try: import_log(*args, **options)
    except InputError as e:
        assert "\n" not in str(e) and len(str(e)) < 1500
        return str(e)


# --- one small log of every format, three records each

CALL = {"id": "c1", "type": "function", "function": {"name": "get_order_details", "arguments": '{"order_id": "#W1"}'}}
CHAT = [{"role": "system", "content": "Help."}, {"role": "user", "content": "Where is #W1?"}, {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "pending"}, {"role": "assistant", "content": "It is pending."}]
BARE = [{k: v for k, v in m.items() if k != "tool_call_id"} for m in CHAT[:2] + [CHAT[2] | {"tool_calls": [{"function": {"name": "get_order_details", "arguments": {"order_id": "#W1"}}}]}] + CHAT[3:]]
FLAT = {"id": "c1", "name": "get_order_details", "arguments": {"order_id": "#W1"}, "requestor": "assistant"}
OWN_CALL = {"id": "u1", "name": "check_phone", "arguments": {}, "requestor": "user"}
TAU2 = [*CHAT[1:2], {"role": "assistant", "content": None, "tool_calls": [FLAT], "cost": 0.1}, {"role": "tool", "id": "c1", "content": "pending", "requestor": "assistant", "error": False},
        {"role": "assistant", "content": "Look at your phone."}, {"role": "user", "content": None, "tool_calls": [OWN_CALL]},
        {"role": "tool", "tool_messages": [{"role": "tool", "id": "u1", "content": "off", "requestor": "user"}]}, {"role": "user", "content": "It is off."}, CHAT[4]]
SIMULATION = {"id": "s0", "task_id": "7", "trial": 0, "seed": 1, "termination_reason": "user_stop", "messages": TAU2, "reward_info": {"reward": 1.0, "reward_breakdown": {"DB": 1.0}}}
SIMULATIONS = [SIMULATION, SIMULATION | {"id": "s1", "trial": 1, "reward_info": {"reward": 0.0}}, SIMULATION | {"id": "s2", "trial": 2, "reward_info": None, "termination_reason": "infrastructure_error"}]
TASKS = [{"id": "7", "user_scenario": {"instructions": "Ask."}, "evaluation_criteria": {"communicate_info": ["pending"],
          "actions": [{"name": "get_order_details", "arguments": {"order_id": "#W1"}}, {"name": "check_phone", "arguments": {}, "requestor": "user"}]}}]
INFO = {"environment_info": {"domain_name": "telecom", "policy": "Help."}, "agent_info": {"llm": "m", "llm_args": {"api_key": "KEEP-ME-OUT", "temperature": 0.0}},
        "user_info": {"llm_args": {"extra_headers": {"Authorization": "Bearer KEEP-ME-OUT"}}}}
SAMPLES = [{"id": "q", "epoch": n, "messages": [*CHAT[:2], CHAT[2] | {"content": [], "tool_calls": [{"id": "c1", "function": "get_order_details", "arguments": {"order_id": "#W1"}}]},
            CHAT[3] | {"function": "get_order_details"}, CHAT[4] | {"content": [{"type": "text", "text": "It is pending."}]}], "scores": {"match": {"value": value}},
            "metadata": {"api_key": "KEEP-ME-OUT"}} for n, value in enumerate("CIP", 1)]
STEPS = [{"step_id": n, "source": source, "message": text} for n, (source, text) in enumerate([("system", "Help."), ("user", "Where is #W1?"), ("agent", ""), ("agent", "It is pending.")], 1)]
STEPS[2] |= {"tool_calls": [{"tool_call_id": "c1", "function_name": "get_order_details", "arguments": {"order_id": "#W1"}}], "observation": {"results": [{"source_call_id": "c1", "content": "pending"}]}}
ITEMS = [{"class_": "text_observation", "source": "system", "content": "Help."}, {"class_": "text_observation", "source": "user", "content": "Where is #W1?"},
         {"class_": "api_action", "function": "get_order_details", "kwargs": {"order_id": "#W1"}}, {"class_": "text_observation", "source": "environment", "content": "pending"},
         {"class_": "message_action", "content": "It is pending."}]
TURNS = [("system", "Help."), ("human", "Where is #W1?"), ("function_call", '{"name": "get_order_details", "arguments": {"order_id": "#W1"}}'), ("observation", "pending"), ("gpt", "It is pending.")]
OUTCOMES = [{"reward": 1.0}, {"reward": 0.0}, {"reward": 0.5}]

LISTS = {   # a JSON list, and each of them as JSON lines
    "tau_bench": [{"task_id": 7, "trial": n, "reward": r["reward"], "info": {"task": {"user_id": "mia", "actions": []}}, "traj": CHAT} for n, r in enumerate(OUTCOMES)],
    "trajectories": [conversation(7, n, n == 0).to_dict() for n in range(3)],
    "chat": [{"messages": BARE, "tools": [], "metadata": {"task_id": "7", "password": "KEEP-ME-OUT"}, **r} for r in OUTCOMES],
    "sharegpt": [{"conversations": [{"from": who, "value": text} for who, text in TURNS], **r} for r in OUTCOMES],
    "atif": [{"schema_version": "ATIF-v1.7", "session_id": f"s{n}", "agent": {"name": "a", "version": "1", "model_name": "m"}, "steps": STEPS, "extra": r} for n, r in enumerate(OUTCOMES)],
    "adp": [{"id": f"s{n}", "content": ITEMS, "details": r | {"access_token": "KEEP-ME-OUT"}} for n, r in enumerate(OUTCOMES)]}
OBJECTS = {
    "tau2": {"timestamp": "now", "info": INFO, "tasks": TASKS, "simulations": [s | {"skipped": False} for s in SIMULATIONS]},
    "inspect": {"version": 2, "status": "success", "eval": {"task": "orders", "model": "m", "scorers": [{"name": "match"}], "model_args": {"api_key": "KEEP-ME-OUT"}}, "samples": SAMPLES}}


def write_lines(path, records): path.write_text("".join(json.dumps(r) + "\n" for r in records)); return path
def write_value(path, value, **how): path.write_text(json.dumps(value, **how)); return path


def write_tau2_folder(folder):
    "Upstream's 1.x folder: the results list the simulations, each of which is a file."
    (folder/"simulations").mkdir(parents=True)
    for s in SIMULATIONS: write_value(folder/"simulations"/f"{s['id']}.json", s | {"mode": "half_duplex", "ticks": None, "hallucination_retries_used": 0})
    write_value(folder/"results.json", {"timestamp": "now", "info": INFO, "tasks": TASKS, "simulation_index": [{"id": s["id"], "task_id": "7", "trial": s["trial"]} for s in SIMULATIONS]})
    return folder


def write_toolsandbox(folder):
    rows = [{"name": f"find_{n}", "categories": ["SINGLE_TOOL_CALL"], "similarity": s, "milestone_similarity": s, "minefield_similarity": 0, "turn_count": 4} for n, s in enumerate((1.0, .7))]
    for row in rows:
        (folder/"trajectories"/row["name"]).mkdir(parents=True)
        write_value(folder/"trajectories"/row["name"]/"conversation.json", [m | {f"{m['role']}_details": {"database_update": {}}} for m in CHAT])
    crashed = {"name": "find_2", "categories": [], "similarity": 0, "traceback": "...", "exception_type": "RateLimitError"}
    write_value(folder/"result_summary.json", {"per_scenario_results": [*rows, crashed], "git_sha": "x"})
    return folder


def logs_of(name, folder):
    "One format's log, written every way in which it occurs."
    if name in LISTS: return [write_value(folder/"list.json", LISTS[name]), write_value(folder/"indented.json", LISTS[name], indent=1), write_lines(folder/"lines.jsonl", LISTS[name])]
    if name in OBJECTS: return [write_value(folder/"object.json", OBJECTS[name]), write_value(folder/"indented.json", OBJECTS[name], indent=2)]
    return [{"tau2 folder": write_tau2_folder, "toolsandbox": write_toolsandbox}[name](folder/"agent_m_user_u_1")]


SEEN = ["system", "user", "assistant", "tool", "assistant"]
EVERY = [*LISTS, *OBJECTS, "tau2 folder", "toolsandbox"]


@pytest.mark.parametrize("name", EVERY)
def test_every_format(name, tmp_path):
    for n, log in enumerate(logs_of(name, tmp_path)):
        trajectories, report = read_log(log)
        import_log(log, tmp_path/f"out{n}")
        assert read_trajectories(tmp_path/f"out{n}") == trajectories
        assert report["format"] == name.split()[0] and report["read"] == 3 and report["passed"] == 1 and report["skipped"] == []
        assert "KEEP-ME-OUT" not in (tmp_path/f"out{n}").read_text()
        if name == "trajectories": assert [t.to_dict() for t in trajectories] == LISTS[name]; continue
        assert [m["role"] for m in trajectories[0].messages] == (SEEN[:4] + ["assistant", "user", "assistant"] if name.startswith("tau2") else SEEN)
        made = [c["function"] for m in trajectories[0].messages for c in m.get("tool_calls", [])]
        assert made == [{"name": "get_order_details", "arguments": {"order_id": "#W1"}}]   # the user's own calls are not among them
        assert [m["name"] for m in trajectories[0].messages if m["role"] == "tool"] == ["get_order_details"]


def test_what_each_format_says(tmp_path):
    ids = {name: [t.id for t in read_log(write_value(tmp_path/"log", log))[0]] for name, log in (LISTS | OBJECTS).items()}
    assert ids["tau_bench"] == [f"tau_bench:retail/7/{n}" for n in range(3)] and ids["tau2"] == [f"tau2:telecom/7/{n}" for n in range(3)]
    assert ids["chat"] == [f"chat/7/{n}" for n in range(3)] and ids["inspect"] == [f"inspect:orders/q/{n}" for n in range(3)]
    assert ids["atif"] == [f"atif/s{n}/0" for n in range(3)] and ids["adp"] == [f"adp/s{n}/0" for n in range(3)]
    assert len({i.rsplit("/", 1)[0] for i in ids["sharegpt"]}) == 1


@pytest.mark.parametrize("name", ["tau2", "tau2 folder"])
def test_tau2_in_detail(name, tmp_path):
    passed, failed, broken = read_log(logs_of(name, tmp_path)[0])[0]
    assert passed.metadata["gold"] == [{"name": "get_order_details", "arguments": {"order_id": "#W1"}}] and passed.metadata["outputs"] == ["pending"]
    assert [(c["name"], c["result"], c["message"]) for c in passed.metadata["user_calls"]] == [("check_phone", "off", 5)]
    assert passed.metadata["agent"] == {"llm": "m", "llm_args": {"temperature": 0.0}} and passed.parts == {"DB": 1.0} and passed.seed == 1
    assert (failed.success, broken.success, broken.termination) == (False, None, "environment_error")


def test_toolsandbox_in_detail(tmp_path):
    perfect, near, crashed = read_log(write_toolsandbox(tmp_path/"agent_m_user_u_1"))[0]
    assert (perfect.id, perfect.success, near.success, near.reward, perfect.policy) == ("toolsandbox/find_0/0", True, False, .7, "m")
    assert (crashed.messages, crashed.success, crashed.termination) == ([], None, "environment_error")
    write_toolsandbox(tmp_path/"both"/"agent_m_user_u_1"); write_toolsandbox(tmp_path/"both"/"agent_m_user_u_2")
    assert sorted(t.id for t in read_log(tmp_path/"both")[0]) == sorted(f"toolsandbox/find_{n}/{trial}" for n in range(3) for trial in range(2))


def test_inspect_archives_need_the_package(tmp_path, monkeypatch):
    (tmp_path/"log.eval").write_bytes(b"PK\x03\x04...")
    monkeypatch.setitem(sys.modules, "inspect_ai.log", None)
    assert "pip install inspect-ai" in refusal(tmp_path/"log.eval", tmp_path/"out")
    dumped = lambda value: types.SimpleNamespace(model_dump=lambda **how: value)
    package = types.SimpleNamespace(read_eval_log=lambda *a, **k: types.SimpleNamespace(eval=dumped(OBJECTS["inspect"]["eval"])), read_eval_log_samples=lambda *a, **k: map(dumped, SAMPLES))
    monkeypatch.setitem(sys.modules, "inspect_ai", types.ModuleType("inspect_ai")); monkeypatch.setitem(sys.modules, "inspect_ai.log", package)
    assert read_log(tmp_path/"log.eval")[0] == read_log(write_value(tmp_path/"log.json", OBJECTS["inspect"]))[0]


def test_parquet_rows(tmp_path):
    import pyarrow as pa, pyarrow.parquet as pq
    other = BARE[:2] + [BARE[2] | {"tool_calls": [{"function": {"name": "find_user", "arguments": {"email": "a@b.c"}}}]}] + BARE[3:]
    rows = [{"messages": m, "reward": r} for m, r in ((BARE, 1.0), (other, math.nan))]   # one column of arguments for both tools
    pq.write_table(pa.Table.from_pylist(rows), tmp_path/"log.parquet")
    first, second = read_log(tmp_path/"log.parquet")[0]
    assert first.messages[2]["tool_calls"][0]["function"]["arguments"] == {"order_id": "#W1"} and second.messages[2]["tool_calls"][0]["function"]["arguments"] == {"email": "a@b.c"}
    assert (first.success, second.success) == (True, None)


def unknown_keys(value):
    "The same value with a key that no format knows in every object but those whose keys are somebody's data."
    if isinstance(value, list): return [unknown_keys(v) for v in value]
    if not isinstance(value, dict): return value
    return {"surprise": {"new": [None]}} | {k: v if k in ("arguments", "kwargs", "llm_args", "metadata", "details", "extra", "scores", "reward_breakdown") else unknown_keys(v) for k, v in value.items()}


@pytest.mark.parametrize("name", [*set(LISTS) - {"trajectories"}, *OBJECTS])
def test_unknown_keys_and_their_order_do_not_matter(name, tmp_path):
    log = (LISTS | OBJECTS)[name]
    expected = read_log(write_value(tmp_path/"log", log))[0]
    assert read_log(write_value(tmp_path/"log", unknown_keys(log)))[0] == expected
    assert read_log(write_value(tmp_path/"log", log, sort_keys=True))[0] == expected
    assert read_log(write_value(tmp_path/"log", json.loads(json.dumps(log), object_pairs_hook=lambda pairs: dict(pairs[::-1]))))[0] == expected


# --- the real logs

@needs_logs
@pytest.mark.parametrize("name", REAL)
def test_real_logs_round_trip(name, tmp_path):
    assert import_log(SHARED/name, tmp_path/"t.jsonl").startswith("{} trajectories, {} passed\n".format(*REAL[name]))
    trajectories = read_log(SHARED/name)[0]
    assert read_trajectories(tmp_path/"t.jsonl") == trajectories and len(trajectories) == REAL[name][0]
    for out, to in (("again.jsonl", "jsonl"), ("rows.jsonl", "messages"), ("rows.parquet", "messages"), ("atif.jsonl", "atif")):
        export_log(tmp_path/"t.jsonl", tmp_path/out, to)
        assert read_log(tmp_path/out)[0] == trajectories
    import_log(tmp_path/"rows.parquet", tmp_path/"back.jsonl")
    assert read_trajectories(tmp_path/"back.jsonl") == trajectories


@needs_logs
def test_gold_replays_make_the_gold_calls():
    for name in list(REAL)[1:]:
        for t in read_log(SHARED/name)[0]:
            made = [c["function"] for m in t.messages for c in m.get("tool_calls", [])]
            assert t.messages[0]["role"] == "system" and t.tools and t.reward == math.prod(t.parts.values())
            assert not t.success or made == t.metadata["gold"]


# --- damaged logs: one line or a full count, never less

def counted(log, out, present=None):
    "Import what can be imported; whatever is present is read or skipped."
    try: text = import_log(log, out, skip_bad=True)
    except InputError as e:
        assert "\n" not in str(e) and len(str(e)) < 1500 and not out.exists()
        return None
    read = len(read_trajectories(out)); out.unlink()
    skipped = read_log(log, skip_bad=True)[1]["skipped"]
    assert text.startswith(f"{read} trajectories, ") and all(s["file"] == str(log) and s["record"] and s["reason"] and len(s["reason"]) <= 300 for s in skipped)
    assert present is None or read + len(skipped) == present
    return read, len(skipped)


@needs_logs
def test_truncated_at_every_kilobyte(tmp_path):
    import_log(SHARED/"tau2_gold_replay_retail.json", tmp_path/"own.jsonl"); export_log(tmp_path/"own.jsonl", tmp_path/"rows.parquet")
    for whole in (SHARED/"tau2_gold_replay_airline.json", SHARED/"tau2_gold_replay_retail.json", SHARED/"tau_bench_gpt4o_airline.json.xz", tmp_path/"rows.parquet"):
        data = whole.read_bytes()
        for size in range(0, len(data), 1024):
            (tmp_path/"cut").write_bytes(data[:size])
            assert refusal(tmp_path/"cut", tmp_path/"out", skip_bad=True) and not (tmp_path/"out").exists()
    data = (tmp_path/"own.jsonl").read_bytes()
    for size in range(1024, len(data), 1024):
        (tmp_path/"cut").write_bytes(data[:size])
        done = data[:size].count(b"\n")
        assert counted(tmp_path/"cut", tmp_path/"out", data[:size].count(b"\n") + 1) == ((done, 1) if done else None)


def nodes(value, path=()):
    "The path of every value inside a value."
    yield path
    for key, child in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else (): yield from nodes(child, (*path, key))


def put(value, path, new):
    "A copy of a value with something else at a path."
    if not path: return new
    copy = value.copy()
    copy[path[0]] = put(value[path[0]], path[1:], new)
    return copy


WRONG = [None, 5, -1.5, True, "x", "", [], {}, [None], {"x": 1}, math.inf, math.nan, 10**400, "\ud800", "line\nbreak"]


@pytest.mark.parametrize("name", [*LISTS, *OBJECTS])
def test_wrong_types_everywhere(name, tmp_path):
    whole = (LISTS | OBJECTS)[name]
    records = whole if name in LISTS else whole["simulations" if name == "tau2" else "samples"]
    for path in nodes(records[1]):
        for new in random.Random(str(path)).sample(WRONG, 5):
            changed = [records[0], put(records[1], path, new), records[2]]
            log = changed if name in LISTS else whole | {"simulations" if name == "tau2" else "samples": changed}
            assert counted(write_value(tmp_path/"log", log), tmp_path/"out", 3)[0] >= 2


@pytest.mark.parametrize("name", OBJECTS)
def test_wrong_types_around_the_records(name, tmp_path):
    for path in nodes({k: v for k, v in OBJECTS[name].items() if k not in ("simulations", "samples")}):
        for new in WRONG[:11]: counted(write_value(tmp_path/"log", put(OBJECTS[name], path, new)), tmp_path/"out", 3 if path else None)
    for new in WRONG[:11]: counted(write_value(tmp_path/"log", OBJECTS[name] | {"simulations" if name == "tau2" else "samples": new}), tmp_path/"out")


def test_wrong_folders(tmp_path):
    sandbox, folder = write_toolsandbox(tmp_path/"agent_m_user_u_1"), write_tau2_folder(tmp_path/"tau2")
    for new in (*WRONG[:11], "{", "\xff"):
        text = new if new in ("{", "\xff") else json.dumps(new)
        (sandbox/"trajectories"/"find_0"/"conversation.json").write_text(text, encoding="latin-1"); (folder/"simulations"/"s1.json").write_text(text, encoding="latin-1")
        assert counted(sandbox, tmp_path/"out", 3)[0] >= 2 and counted(folder, tmp_path/"out", 3)[0] >= 2
    (folder/"simulations"/"s1.json").unlink()
    assert counted(folder, tmp_path/"out", 3) == (2, 1)
    (sandbox/"result_summary.json").write_text("{")
    assert counted(sandbox, tmp_path/"out", 3) == (1, 2)   # one without a score, one broken, and the summary


@pytest.mark.parametrize("name", LISTS)
def test_long_strings(name, tmp_path):
    long = 10 * 2**20 * "x"
    for path in list(nodes(LISTS[name][1]))[1::11]:
        assert counted(write_lines(tmp_path/"log", [LISTS[name][0], put(LISTS[name][1], path, long), LISTS[name][2]]), tmp_path/"out", 3)[0] >= 2


def test_invalid_bytes(tmp_path):
    data = write_lines(tmp_path/"log", LISTS["trajectories"]).read_bytes()
    for at in range(0, len(data), 97):
        for byte in (b"\xff", b"\xc3(", b"\x00"):
            (tmp_path/"log").write_bytes(data[:at] + byte + data[at:])
            assert counted(tmp_path/"log", tmp_path/"out", 3) == (2, 1)
    (tmp_path/"log").write_bytes(data.decode().encode("utf-16"))
    assert "not UTF-8 text" in refusal(tmp_path/"log", tmp_path/"out")


def test_deep_nesting(tmp_path):
    for depth in (200, 900, 5000):
        nested = '{"messages": [{"role": "user", "content": "Hi."}], "metadata": ' + '{"a": ' * depth + "1" + "}" * depth + "}\n"
        (tmp_path/"log").write_text(nested + json.dumps(LISTS["chat"][0]) + "\n")
        assert counted(tmp_path/"log", tmp_path/"out", 2)[0] >= 1


# --- files and folders

@pytest.mark.parametrize("pack", [lzma.compress, gzip.compress])
def test_packed_logs(pack, tmp_path):
    data = write_lines(tmp_path/"log", LISTS["chat"]).read_bytes()
    expected = read_log(tmp_path/"log")[0]
    (tmp_path/"packed").write_bytes(pack(b"\xef\xbb\xbf" + data.replace(b"\n", b"\r\n\r\n")))
    assert read_log(tmp_path/"packed")[0] == expected
    for size in range(8, len(pack(data)) - 1, 16):
        (tmp_path/"packed").write_bytes(pack(data)[:size])
        assert "data is broken" in refusal(tmp_path/"packed", tmp_path/"out")


def test_a_folder_of_logs(tmp_path):
    logs = tmp_path/"logs"; (logs/"sub").mkdir(parents=True)
    write_lines(logs/"a.jsonl", LISTS["atif"]); write_value(logs/"sub"/"tau2.json", OBJECTS["tau2"]); (logs/"sub"/"broken.json").write_text("{")
    write_value(logs/"sub"/"tau2_results.json", {"metrics": {}}); (logs/"readme.txt").write_text("-"); (logs/".hidden.json").write_text("-")
    trajectories, report = read_log(logs, skip_bad=True)
    assert [t.environment for t in trajectories] == ["atif"] * 3 + ["tau2:telecom"] * 3 and report["format"] == "atif, tau2"
    assert [s["record"] for s in report["skipped"]] == ["sub/broken.json"]
    assert "sub/broken.json: not valid JSON" in refusal(logs, tmp_path/"out")
    assert "lies in the folder that is read" in refusal(logs, logs/"out.jsonl")


def test_trials_are_counted_where_the_log_does_not(tmp_path):
    lines = [{"messages": CHAT[:n]} for n in (2, 5, 1)]
    ids = [t.id.rsplit("/", 1) for t in read_log(write_lines(tmp_path/"log", lines))[0]]
    assert ids[0][0] == ids[1][0] != ids[2][0] and [trial for _, trial in ids] == ["0", "1", "0"]


RECORD = {"task_id": 1, "reward": 1.0, "trial": 0, "info": {}, "traj": [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Hello."}]}
NAMELESS = RECORD | {"trial": 1, "traj": [{"role": "assistant", "content": None, "tool_calls": [{"id": "c", "function": {}}]}]}
PACKED = lzma.compress(json.dumps([RECORD] * 3).encode())

BAD_FILES = {
    "empty": (b"", "the file is empty"), "blank": (b"\n \n", "the file is empty"),
    "truncated xz": (PACKED[:-20], "the xz data is broken"), "not UTF-8": (b'["\xff"]', "not UTF-8 text"),
    "truncated JSON": (json.dumps([RECORD]).encode()[:-9], "was the file cut short"), "no JSON": (b"hello", "not valid JSON"),
    "an object": (b'{"runs": [], "tasks": []}', "found an object with the keys runs, tasks; known formats are"), "no simulations": (b'{"simulations": [], "tasks": []}', "holds no record"),
    "a list of numbers": (b"[1, 2]", "record 1: found a int; known formats are"), "an empty list": (b"[]", "holds no record"),
    "no task": (json.dumps([RECORD, {**RECORD, "task_id": None}]).encode(), "record 2: task_id is None; 1 records read, nothing written"),
    "bad reward": (json.dumps([RECORD | {"reward": "high"}]).encode(), "record 1: reward is 'high'"),
    "NaN reward": (json.dumps([RECORD | {"reward": math.nan}]).encode(), "record 1: reward is None"),
    "great reward": (json.dumps([RECORD | {"reward": 7}]).encode(), "record 1: reward must be a number in"),
    "bad info": (json.dumps([RECORD | {"info": "{'task': "}]).encode(), "record 1: info is text, but neither JSON nor a Python dict"),
    "bad role": (json.dumps([RECORD | {"traj": [{"role": "robot"}]}]).encode(), "record 1: message 0 has role 'robot'"),
    "nameless call": (json.dumps([RECORD, NAMELESS]).encode(), "record 2: message 0 has a tool call without a function name"),
    "orphan answer": (json.dumps([RECORD | {"traj": [{"role": "tool", "tool_call_id": "c", "content": ""}]}]).encode(), "record 1: message 0 answers the call 'c'"),
    "repeated id": (json.dumps([RECORD, RECORD]).encode(), "record 2: has the id tau_bench:unknown/1/0, which record 1 has already"),
    "bad metadata": (json.dumps(conversation(1, 0, True).to_dict() | {"metadata": None}).encode(), "line 1: metadata is of type NoneType, not dict"),
    "broken line": (json.dumps(conversation(1, 0, True).to_dict()).encode() + b'\n{"id": ', "line 2: not valid JSON"),
    "a voice run": (json.dumps({"info": {}, "simulations": [{"task_id": 1, "messages": None, "ticks": [{}]}]}).encode(), "line 1, simulation 1: it is a voice simulation"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_bad_log(name, tmp_path):
    data, part = BAD_FILES[name]
    log, out = tmp_path/"log", tmp_path/"out.jsonl"
    log.write_bytes(data); out.write_text("earlier")
    message = refusal(log, out)
    assert part in message and str(log) in message and out.read_text() == "earlier"


def test_bad_paths(tmp_path):
    log = write_value(tmp_path/"log.json", [RECORD])
    assert "no such file" in refusal(tmp_path/"nowhere", tmp_path/"out")
    assert "is a folder; name a file" in refusal(log, tmp_path)
    assert "would overwrite the log" in refusal(log, log)
    assert "not a folder; name another place" in refusal(log, log/"out")
    assert "unknown format 'csv' to write; known: jsonl, messages, atif" in refusal(log, tmp_path/"out", to="csv")
    assert "add --to messages" in refusal(log, tmp_path/"out.parquet")
    (tmp_path/"nothing").mkdir()
    assert "holds no record" in refusal(tmp_path/"nothing", tmp_path/"out")


def test_skip_bad_counts_every_record(tmp_path):
    log = write_value(tmp_path/"log.json", [RECORD, NAMELESS, RECORD, 5, RECORD | {"trial": 2, "reward": 0.0}])
    text = import_log(log, tmp_path/"out.jsonl", skip_bad=True)
    assert text.splitlines()[:2] == ["2 trajectories, 1 passed", f"3 records of {log} left out:"]
    assert [s["record"] for s in read_log(log, skip_bad=True)[1]["skipped"]] == ["record 2", "record 3", "record 4"]
    assert "all 1 records are bad" in refusal(write_value(log, [NAMELESS]), tmp_path/"other.jsonl", skip_bad=True)


def test_crashed_episodes_have_no_outcome(tmp_path):
    log = write_value(tmp_path/"log.json", [RECORD, RECORD | {"trial": 1, "reward": 0.0, "traj": [], "info": {"error": "timeout", "traceback": "..."}}])
    assert import_log(log, tmp_path/"out.jsonl").startswith("2 trajectories, 1 passed, 1 without an outcome")


def test_almost_one_is_a_success(tmp_path):
    log = write_value(tmp_path/"log.json", [RECORD | {"reward": 1 - 1e-7}, RECORD | {"reward": .999, "trial": 1}])
    assert [t.success for t in read_log(log)[0]] == [True, False]


def test_no_credentials_are_kept(tmp_path):
    t = conversation(1, 0, True)
    agent = {"llm_args": {"api_key": "KEEP-ME-OUT", "seed": 1, "base_url": "https://me:KEEP-ME-OUT@host"}, "headers": ["Bearer KEEP-ME-OUT"]}
    write_trajectories([replace(t, metadata=t.metadata | {"agent": agent})], tmp_path/"log.jsonl")
    import_log(tmp_path/"log.jsonl", tmp_path/"out.jsonl")
    assert read_trajectories(tmp_path/"out.jsonl")[0].metadata["agent"] == {"llm_args": {"seed": 1}, "headers": []}


def test_our_own_files_pass_unchanged(tmp_path):
    small = [conversation(task, trial, success=bool(task % 2), forgets=not task % 2) for task in range(10, 20) for trial in range(2)]
    write_trajectories(small, tmp_path/"log.jsonl")
    (tmp_path/"log.jsonl.xz").write_bytes(lzma.compress((tmp_path/"log.jsonl").read_bytes()))
    assert read_log(tmp_path/"log.jsonl")[0] == read_log(tmp_path/"log.jsonl.xz")[0] == small


# --- memory

MEASURE = """
import resource, sys
from trace_nb.diagnose.logs import import_log
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
before = peak()
import_log(sys.argv[1], sys.argv[2])
print(peak() - before)
"""


def test_lines_are_streamed(tmp_path):
    line = json.dumps(conversation(1, 0, True).to_dict() | {"metadata": {"text": 6000 * "x"}})
    with open(tmp_path/"log.jsonl", "w") as f: f.writelines(line.replace("desk:retail/1/0", f"desk:retail/1/{n}") + "\n" for n in range(60 * 2**20 // len(line)))
    run = subprocess.run([sys.executable, "-c", MEASURE, tmp_path/"log.jsonl", tmp_path/"out.jsonl"], capture_output=True, text=True, check=True)
    assert int(run.stdout) < 20   # MB, for a log of 60
