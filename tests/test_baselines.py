"GEPA pays for each rollout once, goes on where it was killed, and stops when its reflector fails."
import json, sys
from collections import Counter

import pytest

pytest.importorskip("gepa", reason="the package gepa is not installed")

from endpoint_server import EndpointServer, text_of
from trace_nb.core.endpoint import Endpoint
from trace_nb.core.policy import Scripted
from trace_nb.core.trajectory import InputError
from trace_nb.diagnose.labeling import CANDIDATES
from trace_nb.evaluate.baselines import endpoint_reflector, gepa_prompt, policy_texts, prompted, scripted_reflector
from trace_nb.evaluate.ledger import charge, ledger_record, total_rollouts
from trace_nb.targets.desk import load_tasks

WORD, HALF = CANDIDATES["precondition_verification"], CANDIDATES["multi_step_task_completion"]
FEW = load_tasks("desk", "train")[24:40]


class Killed(KeyboardInterrupt): pass


def agent(after=None):
    "Solves all with one sentence, makes the first call with another; dies after some episodes. And its count."
    played = Counter()
    def steps(env):
        if played["episodes"] == after: raise Killed
        played["episodes"] += 1
        return env._oracle() if WORD in env.policy_text else [s for s in env._oracle() if isinstance(s, dict)][:1] if HALF in env.policy_text else ["No."]
    return Scripted("agent", steps), played


def search(policy, folder, budget=130, **options):
    return gepa_prompt(policy, FEW, budget, 0, folder, **{"reflector": scripted_reflector([HALF, WORD, "Be kind."]), "validation": 6} | options)


def test_the_deciding_sentence_is_found_and_each_rollout_is_counted(tmp_path):
    policy, played = agent()
    found = search(policy, tmp_path)
    assert all(WORD in text for text in found["texts"].values()) and found["score"] == 1 > found["first_score"]
    record = ledger_record("gepa")
    for stage, n in found["stages"].items(): charge(record, stage, n)
    assert played["episodes"] == found["rollouts"] == total_rollouts(record) == 130 - found["unspent"] and 0 <= found["unspent"] < 12
    assert sum(len(json.loads(line)["tasks"]) for line in (tmp_path/"evaluations.jsonl").read_text().splitlines()) == found["rollouts"]


@pytest.mark.parametrize("after", [3, 40, 77])
def test_a_killed_search_ends_as_an_uninterrupted_one(tmp_path, after):
    search(agent()[0], tmp_path/"whole")
    with pytest.raises(Killed): search(agent(after)[0], tmp_path/"killed")
    kept = (tmp_path/"killed"/"evaluations.jsonl")
    paid = sum(len(json.loads(line)["tasks"]) for line in kept.read_text().splitlines()) if kept.exists() else 0
    if kept.exists(): kept.write_text(kept.read_text() + '{"tasks": ["a')       # a line that was being written
    policy, played = agent()
    found = search(policy, tmp_path/"killed")
    assert played["episodes"] == found["rollouts"] - paid
    for name in ("gepa.json", "evaluations.jsonl", "search.json"): assert (tmp_path/"killed"/name).read_bytes() == (tmp_path/"whole"/name).read_bytes()


def test_a_larger_budget_continues_and_another_search_is_refused(tmp_path):
    small = search(agent()[0], tmp_path/"grown", 70)
    policy, played = agent()
    large = search(policy, tmp_path/"grown", 130)
    assert played["episodes"] == large["rollouts"] - small["rollouts"] and large == search(agent()[0], tmp_path/"direct", 130)
    with pytest.raises(InputError, match="holds a search with other minibatch"): search(agent()[0], tmp_path/"grown", minibatch=4)
    with pytest.raises(InputError, match="line 1: an evaluation of another run"):
        (tmp_path/"grown"/"search.json").unlink()
        gepa_prompt(agent()[0], FEW, 130, 1, tmp_path/"grown", validation=6)


def test_an_endpoint_reflects_and_its_tokens_are_counted_apart(tmp_path):
    def reply(body):
        "Adds the sentence that the feedback asks for, as a model would."
        assert "Calls that were needed and not made" in text_of(body)
        return f"Here it is:\n```\n{text_of(body).split('```')[1].strip()} {WORD}\n```"
    with EndpointServer(reply) as server:
        found = search(agent()[0], tmp_path/"a", reflector=endpoint_reflector(Endpoint(server.url, "m", tmp_path/"cache.sqlite")))
        asked = server.answered
        again = search(agent()[0], tmp_path/"b", reflector=endpoint_reflector(Endpoint(server.url, "m", tmp_path/"cache.sqlite")))
        assert server.answered == asked and again == found, "answers come from the cache the second time, at the same price in the books"
    assert found["score"] == 1 and found["texts"]["retail"] == f"{policy_texts(FEW)['retail']} {WORD}"
    spent = found["reflection"]
    assert spent["calls"] == asked and spent["prompt_tokens"] + spent["completion_tokens"] == server.tokens and found["rollouts"] <= 130


def test_a_silent_endpoint_stops_the_search_instead_of_spending_its_budget(tmp_path):
    policy, played = agent()
    with EndpointServer(fault=lambda body, times: "500") as server:
        with pytest.raises(InputError, match="run again to go on"): search(policy, tmp_path, reflector=endpoint_reflector(Endpoint(server.url, "m", tmp_path/"cache.sqlite", attempts=2, wait=.01)))
    assert played["episodes"] == 6 + 3 and not (tmp_path/"gepa.json").exists()
    assert search(agent()[0], tmp_path) == search(agent()[0], tmp_path/"other"), "the same folder goes on with a reflector that answers"


def test_what_cannot_be_searched_is_said_first(tmp_path, monkeypatch):
    policy, played = agent()
    with pytest.raises(InputError, match="outside the train split"): gepa_prompt(policy, load_tasks("desk", "test"), 500, 0, tmp_path)
    with pytest.raises(InputError, match="give at least 18"): search(policy, tmp_path, 17)
    with pytest.raises(InputError, match="at least one task on both sides"): search(policy, tmp_path, validation=16)
    monkeypatch.setitem(sys.modules, "gepa", None)
    with pytest.raises(InputError, match="pip install gepa"): search(policy, tmp_path)
    assert not played and not list(tmp_path.iterdir())


def test_prompted_worlds_keep_tools_names_and_verdicts():
    texts = {"airline": "Fly.", "retail": policy_texts(FEW)["retail"]}
    for task, cls in zip(FEW, prompted(FEW, texts)):
        assert cls.__name__ == task.environment.__name__ and issubclass(cls, task.environment) and cls.policy_text == texts[task.domain]
        assert (cls is task.environment) == (task.domain == "retail")
