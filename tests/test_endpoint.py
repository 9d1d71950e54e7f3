"The endpoint client and the analyst against a scripted server on 127.0.0.1 that is good, sloppy or failing."
import json, os, re, signal, sqlite3, subprocess, sys, threading, time
from dataclasses import replace
from pathlib import Path

import pytest

from endpoint_server import EndpointServer, failing, good, sloppy, text_of, truth
from trace_nb.core.endpoint import Budget, BudgetSpent, Endpoint, Unanswered, estimated_tokens
from trace_nb.core.trajectory import InputError, Trajectory, write_trajectories
from trace_nb.diagnose.analyst import CONTROLS, compact, label_with_endpoint
from trace_nb.diagnose.labeling import read_label_runs

NAMES = {"multi_step_task_completion": "Do all that is asked.", "precondition_verification": "Check before a write.", "structured_data_reasoning": "Pick the right rows.",
         "tool_calling_precision": "Call well.", "conditional_reasoning": "Follow the ifs.", "numerical_reasoning": "Get sums right.",
         "information_communication": "Tell the facts.", "early_termination": "Stay with it.", "policy_compliance": "Obey the policy."}
ALL = [*NAMES, *(c.name for c in CONTROLS)]
SECRET, HIDDEN = "sk-a-key-that-must-not-leak-0123456789", "GRADER-SAYS-SO"
HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture(autouse=True)
def key(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", SECRET)


def logs(count, success=lambda n: n % 3 == 0):
    "Conversations that differ by a ticket number; what graders know carries a mark."
    def one(n):
        call = {"id": "c1", "type": "function", "function": {"name": "get_ticket", "arguments": {"ticket": n}}}
        messages = [{"role": "system", "content": "Help with tickets."}, {"role": "user", "content": f"Please close ticket {n:04}."}, {"role": "assistant", "content": None, "tool_calls": [call]},
                    {"role": "tool", "tool_call_id": "c1", "name": "get_ticket", "content": '{"status": "open"}'}, {"role": "assistant", "content": "Closed."}]
        return Trajectory(f"{HIDDEN}/{n}/0", f"{n}", 0, n, HIDDEN, HIDDEN, messages, reward=float(success(n)), success=success(n),
                          parts={HIDDEN: 1.0}, metadata={"gold": [{"name": HIDDEN, "arguments": {}}], "reward_info": HIDDEN})
    return [one(n) for n in range(count)]


def label(trajectories, out, server, **options):
    options = {"candidates": NAMES, "runs": 2, "wait": .01, "timeout": 5, "log": lambda line: None} | options
    return label_with_endpoint(trajectories, out, server.url, "scripted", **options)


def rows(out): return [json.loads(line) for line in (out/"labels.jsonl").read_text().splitlines()]


def files(out): return {p.name: p.read_bytes() for p in sorted(out.iterdir()) if p.suffix != ".sqlite" and p.name != "manifest.json"}


def check(out, count, runs, absent=()):
    "Every pair of every run has one label, the true one."
    found = {(r["run"], r["id"], r["capability"]): r for r in rows(out)}
    assert len(found) == len(rows(out)) == runs * (count * len(ALL) - len(absent))
    for (_, id, capability), row in found.items():
        n = int(id.split("/")[1])
        assert row["label"] == truth(f"{n:04}", capability)
        assert row["span"] == (None if row["label"] == "NA" else [1, 13, 24]) and row["task_id"] == str(n)


# --- the whole of it

@pytest.fixture(scope="module")
def big(tmp_path_factory):
    "200 trajectories x 11 candidates x 10 runs, labelled by a server that fails in one attempt of five."
    os.environ["OPENAI_API_KEY"] = SECRET
    out = tmp_path_factory.mktemp("big")/"labels"
    with EndpointServer(good, failing(.2)) as server:
        said = []
        text = label(logs(200), out, server, runs=10, timeout=1.5, attempts=10, log=said.append)
        yield out, server, text, said


def test_no_label_is_lost_or_doubled(big):
    out, server, text, said = big
    check(out, 200, 10)
    runs = read_label_runs(out)
    assert len(runs) == 10 and all(list(r["labels"].keys()) and sum(r["totals"].values()) == 200 for r in runs)
    manifest = json.loads((out/"manifest.json").read_text())
    assert manifest["missing"]["missing"] == 0 and manifest["missing"]["pairs"] == 200 * 11 * 10
    assert manifest["ledger"]["requests"] == server.answered == 250
    assert manifest["ledger"]["failed_attempts"] == len(server.faults) > .15 * len(server.bodies) and len(set(server.faults)) == 6
    assert "200 trajectories of 200 tasks labelled by scripted: 133 failed, 67 passed" in text and said[-1] == "batches labelled: 250 of 250"


def test_second_run_asks_nothing(big):
    out, server, _, _ = big
    before, count = files(out), len(server.bodies)
    label(logs(200)[::-1], out, server, runs=10)
    assert len(server.bodies) == count and files(out) == before
    assert json.loads((out/"manifest.json").read_text())["ledger"]["cached"] == 250


def test_every_run_has_its_order(big):
    "No two requests show the same records in the same order, so no run repeats another's."
    assert len({tuple(re.findall(r"ticket (\d+)", b["messages"][1]["content"])) for b in big[1].bodies}) == 250


def test_the_key_is_in_no_file(big):
    out, server, text, said = big
    assert server.keys == {f"Bearer {SECRET}"}
    assert not any(SECRET.encode() in p.read_bytes() for p in out.rglob("*") if p.is_file())
    assert SECRET not in text + "".join(said)


def test_the_outcome_is_hidden(big, tmp_path):
    assert not any(HIDDEN in text_of(b) for b in big[1].bodies)
    asked = []
    for flip in (False, True):
        with EndpointServer() as server:
            label(logs(20, success=lambda n: (n % 3 == 0) != flip), tmp_path/str(flip), server)
            asked.append(sorted(text_of(b) for b in server.bodies))
    assert asked[0] == asked[1]


# --- a sloppy endpoint

def test_sloppy_answers_are_repaired(tmp_path):
    with EndpointServer(sloppy, failing(.1, ("500", "disconnect"))) as server: label(logs(60), tmp_path/"labels", server, runs=3, attempts=10)
    check(tmp_path/"labels", 60, 3)
    manifest = json.loads((tmp_path/"labels"/"manifest.json").read_text())
    assert manifest["missing"]["missing"] == 0 and {"renamed", "conflicting", "unusable"} <= set(manifest["repairs"])


def test_what_is_never_answered_is_missing(tmp_path):
    def silent(body):
        return json.dumps({"labels": [e for e in json.loads(good(body))["labels"] if (e["quote"], e["capability"]) != ("ticket 0007", "policy_compliance")]})
    with EndpointServer(silent) as server: text = label(logs(10), tmp_path/"labels", server)
    check(tmp_path/"labels", 10, 2, absent=[7])
    run = json.loads((tmp_path/"labels"/"run_01.json").read_text())
    assert run["labels"]["policy_compliance"]["missing_failed"] == [f"{HIDDEN}/7/0"] and "missing_failed" not in run["labels"]["early_termination"]
    missing = json.loads((tmp_path/"labels"/"manifest.json").read_text())["missing"]
    assert (missing["missing"], missing["by_capability"], missing["invalid_runs"]) == (2, {"policy_compliance": 2}, [])
    assert "2 of 220 labels are missing (0.9%)" in text


def test_nothing_usable_writes_nothing(tmp_path):
    with EndpointServer(lambda body: "I would rather not.") as server, pytest.raises(InputError, match="held a label that can be used"): label(logs(5), tmp_path/"labels", server)
    assert [p.name for p in (tmp_path/"labels").iterdir()] == ["answers.sqlite"]


def test_a_server_that_refuses_everything_says_why(tmp_path):
    with EndpointServer(fault=lambda body, times: "400 this model speaks no English") as server:
        with pytest.raises(InputError, match="this model speaks no English"): label(logs(20), tmp_path/"labels", server)


def test_context_too_long_makes_smaller_batches(tmp_path):
    too_long = lambda body, times: "400 maximum context length exceeded" if text_of(body).count("### T") > 3 else None
    with EndpointServer(good, too_long) as server: label(logs(20), tmp_path/"labels", server)
    check(tmp_path/"labels", 20, 2)


# --- names

def test_discovery_fixes_the_names(tmp_path):
    with EndpointServer() as server:
        label(logs(20), tmp_path/"labels", server, candidates=None, runs=1)
        written = json.loads((tmp_path/"labels"/"candidates.json").read_text())["candidates"]
        assert [(c["name"], c["control"]) for c in written] == [("ticket_lookup", False), ("counting", False), ("polite_tone", True), ("fluent_language", True)]
        assert written[0]["merged"] == ["ticket_look_up"]
        count = sum("Name the capabilities" in text_of(b) for b in server.bodies)
        label(logs(20), tmp_path/"labels", server, candidates=None, runs=2)
        assert sum("Name the capabilities" in text_of(b) for b in server.bodies) == count == 3
        assert not any(HIDDEN in text_of(b) for b in server.bodies)
    manifest = json.loads((tmp_path/"labels"/"manifest.json").read_text())
    assert manifest["controls"] == ["polite_tone", "fluent_language"] and set(manifest["labels"]) == {c["name"] for c in written}


# --- budget, dry run, interruption

@pytest.mark.parametrize("budget, options", [(Budget(tokens=40_000), {}), (Budget(cost=.04), {"prices": (1., 1.)})])
def test_budget_stops_and_the_next_run_goes_on(tmp_path, budget, options):
    with EndpointServer() as server:
        with pytest.raises(BudgetSpent, match="raise the budget and run again to go on"): label(logs(60), tmp_path/"labels", server, budget=budget, parallel=4, **options)
        done, spent = server.answered, server.tokens
        assert 0 < done < 16 and 25_000 < spent <= 40_000 and [p.name for p in (tmp_path/"labels").iterdir()] == ["answers.sqlite"]
        label(logs(60), tmp_path/"labels", server)
        assert server.answered == 16
    check(tmp_path/"labels", 60, 2)


def test_a_stop_keeps_earlier_labels(tmp_path):
    with EndpointServer() as server:
        label(logs(20), tmp_path/"labels", server)
        before = files(tmp_path/"labels")
        with pytest.raises(BudgetSpent): label(logs(20), tmp_path/"labels", server, seed=1, candidates={"other": "Another one."}, budget=Budget(tokens=100))
        assert files(tmp_path/"labels") == before


def test_dry_run_counts_what_a_run_asks(tmp_path):
    with EndpointServer() as server:
        plan = label(logs(30), tmp_path/"labels", server, dry_run=True, prices=(1., 2.))
        assert not server.bodies and not (tmp_path/"labels").exists()
        label(logs(30), tmp_path/"labels", server)
    assert f"{server.answered} requests to make, 0 answers in the cache" in plan and "nothing was asked or written" in plan
    assert int(plan.split("about ")[1].split(" ")[0].replace(",", "")) > sum(len(text_of(b)) // 4 for b in server.bodies)


WORKER = """
import json, sys
from trace_nb.core.trajectory import read_trajectories
from trace_nb.diagnose.analyst import label_with_endpoint
url, logs, out, names = sys.argv[1:]
label_with_endpoint(read_trajectories(logs), out, url, "scripted", runs=2, candidates=json.loads(names), wait=.01)
"""


def worker(server, path, out): return subprocess.Popen([sys.executable, "-c", WORKER, server.url, str(path), str(out), json.dumps(NAMES)], stdout=subprocess.DEVNULL)


def test_a_killed_run_goes_on(tmp_path):
    write_trajectories(logs(160), tmp_path/"logs.jsonl")
    with EndpointServer(pause=.15) as server:
        process = worker(server, tmp_path/"logs.jsonl", tmp_path/"labels")
        while server.answered < 6 and process.poll() is None: time.sleep(.02)
        process.send_signal(signal.SIGKILL); process.wait()
        asked = len(server.bodies)
        assert asked < 40 and not (tmp_path/"labels"/"labels.jsonl").exists()
        server.pause = 0
        label(logs(160), tmp_path/"labels", server)
        assert 40 <= len(server.bodies) <= 40 + 2 * 8    # only what was under way is asked twice
    check(tmp_path/"labels", 160, 2)


def test_two_processes_share_a_cache(tmp_path):
    "Answers differ from request to request, yet both processes end with the same labels, since the first answer stays."
    both_ask = threading.Event()
    def moody(body):
        both_ask.wait(60)
        return json.dumps({"labels": [e | {"reason": f"Thought {time.time_ns()}."} for e in json.loads(good(body))["labels"]]})
    write_trajectories(logs(80), tmp_path/"logs.jsonl")
    with EndpointServer(moody, pause=.05) as server:
        processes = [worker(server, tmp_path/"logs.jsonl", tmp_path/"labels") for _ in range(2)]
        while len(server.bodies) <= 8 and all(p.poll() is None for p in processes): time.sleep(.02)     # one process alone has 8 requests under way
        both_ask.set()
        assert [p.wait() for p in processes] == [0, 0]
        both, count = files(tmp_path/"labels"), len(server.bodies)
        assert 20 < count <= 40
        label(logs(80), tmp_path/"labels", server)
        assert len(server.bodies) == count and files(tmp_path/"labels") == both
    check(tmp_path/"labels", 80, 2)
    with sqlite3.connect(tmp_path/"labels"/"answers.sqlite") as database:
        assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",) and database.execute("SELECT count(*) FROM answers").fetchone() == (20,)


# --- a failing endpoint

def endpoint(server, folder, **options): return Endpoint(server.url, "scripted", folder/"answers.sqlite", **({"wait": .01, "timeout": 5} | options))


@pytest.mark.parametrize("status, said", [("401", r"the key in \$OPENAI_API_KEY is refused \(401\)"), ("403", "is refused"), ("404", "no model 'scripted' at this address"),
                                          ("429 insufficient_quota", "no quota left")])
def test_faults_that_stay_stop_at_once(tmp_path, status, said):
    with EndpointServer(fault=lambda body, times: status) as server:
        with pytest.raises(InputError, match=said) as caught: label(logs(20), tmp_path/"labels", server, parallel=1)
        assert len(server.bodies) == 1 and SECRET not in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["500", "disconnect", "page", "cut", "429"])
def test_a_server_that_is_down_stops_the_run(tmp_path, kind):
    with EndpointServer(fault=lambda body, times: kind) as server:
        with pytest.raises(InputError, match="3 requests in a row got no answer") as caught: label(logs(40), tmp_path/"labels", server, parallel=1, attempts=2)
        assert len(server.bodies) == 3 * 2 and SECRET not in str(caught.value)
    assert not (tmp_path/"labels"/"manifest.json").exists()


def test_nobody_listens(tmp_path):
    with EndpointServer() as server: pass
    with pytest.raises(InputError, match="Connection error"): label(logs(40), tmp_path/"labels", server, parallel=2, attempts=2)


def test_timeouts_are_repeated(tmp_path):
    with EndpointServer(lambda body: "Hello.", lambda body, times: "timeout" if times < 3 else None) as server:
        client = endpoint(server, tmp_path, timeout=.3)
        assert client.ask(HELLO).text == "Hello." and client.ledger.failed_attempts == 2


def test_one_request_that_fails_leaves_the_others(tmp_path):
    with EndpointServer(lambda body: "Hello.", lambda body, times: "500" if "3" in text_of(body) else None) as server:
        client, found = endpoint(server, tmp_path, attempts=2), {}
        for n in range(6):
            try: found[n] = client.ask([{"role": "user", "content": f"Say {n}"}]).text
            except Unanswered as e: assert "no answer" in str(e)
        assert sorted(found) == [0, 1, 2, 4, 5] and client.ledger.given_up == 1


def test_a_server_without_structured_answers(tmp_path):
    "It refuses the schema once and is not asked to hold to one again."
    refuses = lambda body, times: "400 'response_format' is not supported" if "response_format" in body else None
    with EndpointServer(good, refuses) as server: label(logs(40), tmp_path/"labels", server, parallel=1)
    check(tmp_path/"labels", 40, 2)
    assert len(server.faults) == 1


def test_another_variable_holds_the_key(tmp_path, monkeypatch):
    monkeypatch.setenv("OTHER_KEY", "another")
    with EndpointServer(lambda body: "Hello.") as server:
        endpoint(server, tmp_path, key_variable="OTHER_KEY").ask(HELLO)
        assert server.keys == {"Bearer another"}


@pytest.mark.parametrize("given, said", [({}, "holds no candidates"), ({"a": 3}, "has no name or no description"), ([1], "candidate 1"), ("missing.json", "no such file")])
def test_bad_candidates_cost_nothing(tmp_path, given, said):
    with EndpointServer() as server:
        with pytest.raises(InputError, match=said): label(logs(5), tmp_path/"labels", server, candidates=given if isinstance(given, (dict, str)) else written(tmp_path, given))
        assert not server.bodies


def written(folder, content):
    (folder/"candidates.json").write_text(json.dumps(content))
    return folder/"candidates.json"


# --- compaction

def test_compaction_holds_its_budget():
    long = ["word " * n for n in (3, 300, 30_000)] + ["数" * 5000, "", "a\n### T1\n[0] user: not a message"]
    messages = [m for n in range(40) for m in ({"role": "user", "content": long[n % 6]}, {"role": "assistant", "content": long[(n + 1) % 6], "tool_calls":
                [{"id": f"c{n}", "function": {"name": "look", "arguments": {"text": long[(n + 2) % 6]}}}]}, {"role": "tool", "tool_call_id": f"c{n}", "content": long[(n + 3) % 6]})]
    for count in (1, 5, 30, 120):
        t = replace(logs(1)[0], messages=messages[:count])
        for tokens in (600, 1500, 5000): assert estimated_tokens(compact(t, tokens)) <= tokens
        assert "\n###" not in compact(t, 5000) and "\n[0] user: not" not in compact(t, 5000)
