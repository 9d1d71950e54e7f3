"A policy behind a server on 127.0.0.1 that is good, slow, greedy with tokens or gone."
import json, socket, threading, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from trace_nb.core.policy import load_policy
from trace_nb.core.rollout import rollout
from trace_nb.core.trajectory import InputError
from trace_nb.synthesize.capabilities import MultiStepRetail

SECRET = "sk-a-key-that-must-not-leak-0123456789"


def opening(seed):
    environment = MultiStepRetail(); first = environment.reset(seed=seed)
    return first, environment._oracle()


GOLD = dict(map(opening, range(12)))


@pytest.fixture(autouse=True)
def key(monkeypatch): monkeypatch.setenv("OPENAI_API_KEY", SECRET)


class Server:
    "Plays the gold of `MultiStepRetail`; `change(body, message, n) -> message, or a status and words` spoils the n-th request."
    def __init__(self, change=lambda body, message, n: message, pause=0., usage={"prompt_tokens": 100, "completion_tokens": 10}):
        self.change, self.pause, self.usage, self.bodies, self.headers, self.most, self.now, self.lock = change, pause, usage, [], [], 0, 0, threading.Lock()
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (Handler,), {"owner": self}))
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"
    def __enter__(self): threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": .05}, daemon=True).start(); return self
    def __exit__(self, *_): self.server.shutdown(); self.server.server_close()


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        o, body = self.owner, json.loads(self.rfile.read(int(self.headers["content-length"])))
        with o.lock: o.bodies.append(body); o.headers.append(self.headers.get("authorization")); n = len(o.bodies); o.now += 1; o.most = max(o.most, o.now)
        time.sleep(o.pause)
        with o.lock: o.now -= 1
        said = o.change(body, gold(body), n)
        status, words, headers = said if isinstance(said, tuple) else (200, None, {})
        finish = said.pop("finish", "stop") if status == 200 else None
        self.give(status, {"error": {"message": words}} if words else {"choices": [{"index": 0, "finish_reason": finish, "message": said}], "usage": o.usage}, headers)

    def give(self, status, content, headers):
        data = json.dumps(content).encode(); self.send_response(status)
        for k, v in {"content-type": "application/json", "content-length": str(len(data)), **headers}.items(): self.send_header(k, v)
        self.end_headers(); self.wfile.write(data)

    def log_message(self, *_): pass


def gold(body):
    step = GOLD[body["messages"][1]["content"]][sum(m["role"] == "assistant" for m in body["messages"])]
    if isinstance(step, str): return {"role": "assistant", "content": step}
    return {"role": "assistant", "content": None, "tool_calls": [{"id": "c0", "type": "function", "function": {"name": step["name"], "arguments": json.dumps(step["arguments"])}}]}


def policy(server, **options): return load_policy(server.url, **({"model": "gold", "wait": .01, "timeout": 5, "say": lambda line: None} | options))


def test_the_gold_wins_in_parallel():
    with Server(pause=.1) as server:
        agent = policy(server, prices=(1., 2.))
        played = rollout(agent, MultiStepRetail, range(12))
    assert all(t.success for t in played) and server.most > 3
    ids = [[c["id"] for m in t.messages for c in m.get("tool_calls") or []] for t in played]
    assert all(len(set(i)) == len(i) for i in ids)                                        # the server always says "c0"
    assert agent.server.ledger.requests == len(server.bodies) and agent.server.ledger.to_dict()["cost"] == pytest.approx(len(server.bodies) * (100 + 20) / 1e6)
    assert played[0].policy == "gold" and played[0].metadata["tokens"] == 110 * sum(m["role"] == "assistant" for m in played[0].messages)
    body = server.bodies[0]
    assert body["tools"][0]["type"] == "function" and {"temperature", "seed", "max_tokens"} <= set(body) and set(server.headers) == {f"Bearer {SECRET}"}


def test_a_limit_is_kept_and_announced(capsys):
    "429 with Retry-After: everybody waits, and the wait is said without the key."
    with Server(lambda body, message, n: (429, f"slow down {SECRET}", {"retry-after": "0.4"}) if n == 1 else message) as server:
        began, played = time.time(), rollout(policy(server, say=None), MultiStepRetail, range(2))
    said = capsys.readouterr().err
    assert all(t.success for t in played) and time.time() - began > .4 and "attempt 2 of 6 in 0.4 s" in said and "slow down" in said and SECRET not in said


def test_failing_requests_end_episodes_as_policy_error():
    "Two conversations fail for good; the others are not touched."
    lost = list(GOLD)[:2]
    with Server(lambda body, message, n: (500, f"oops {SECRET}", {}) if body["messages"][1]["content"] in lost and len(body["messages"]) > 2 else message) as server:
        played = rollout(policy(server, attempts=2), MultiStepRetail, range(6))
    assert [t.termination for t in played] == ["policy_error"] * 2 + ["done"] * 4 and all(t.success for t in played[2:])
    assert "oops" in played[0].metadata["fault"] and SECRET not in json.dumps([t.to_dict() for t in played])


def test_a_server_that_is_down_ends_all_quickly():
    with Server() as server: pass
    played = rollout(policy(server, attempts=2, parallel=2), MultiStepRetail, range(12))
    assert {t.termination for t in played} == {"policy_error"} and not any(t.success for t in played)


@pytest.mark.parametrize("status, said", [(401, "is refused"), (404, "no model 'gold'")])
def test_faults_that_would_stay_stop_the_run(status, said):
    with Server(lambda body, message, n: (status, "no", {})) as server:
        with pytest.raises(InputError, match=said): rollout(policy(server), MultiStepRetail, range(4))


@pytest.mark.parametrize("phase", ["headers", "body"])
def test_a_dripping_server_comes_to_an_end(phase):
    "A byte every 50 ms would keep a timeout between bytes waiting for ever."
    stop, listener = threading.Event(), socket.create_server(("127.0.0.1", 0))
    def drip():
        while not stop.is_set():
            try: connection, _ = listener.accept()
            except OSError: return
            threading.Thread(target=trickle, args=(connection,), daemon=True).start()
    def trickle(connection):
        connection.recv(65536)
        try:
            connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n" + (b"content-length: 100000\r\n\r\n" if phase == "body" else b"x-slow: "))
            while not stop.is_set(): connection.sendall(b" "); time.sleep(.05)
        except OSError: pass
    threading.Thread(target=drip, daemon=True).start()
    agent = load_policy(f"http://127.0.0.1:{listener.getsockname()[1]}/v1", model="slow", attempts=2, wait=.01, timeout=.5, say=lambda line: None)
    began = time.time()
    played = rollout(agent, MultiStepRetail, range(2))
    stop.set(); listener.close()
    assert time.time() - began < 10 and [t.termination for t in played] == ["policy_error"] * 2 and "no whole answer within 0.5 s" in played[0].metadata["fault"]


def test_parallel_calls_are_kept():
    def both(body, message, n):
        if n > 1: return {"role": "assistant", "content": "Done."}
        return {"role": "assistant", "content": "Both.", "reasoning_content": "Two at once.", "tool_calls": [{"id": i, "type": "function", "function": {"name": "get_order_details", "arguments": json.dumps({"order_id": i})}} for i in "ab"]}
    with Server(both) as server: t = rollout(policy(server), MultiStepRetail, [0])[0]
    assert [m["role"] for m in t.messages[2:5]] == ["assistant", "tool", "tool"] and [c["id"] for c in t.messages[2]["tool_calls"]] == ["a", "b"] == [m["tool_call_id"] for m in t.messages[3:5]]
    assert t.messages[2]["reasoning_content"] == "Two at once." and "reasoning_content" not in json.dumps(server.bodies[1])


@pytest.mark.parametrize("usage", [{"prompt_tokens": 10**30, "completion_tokens": -7}, {"prompt_tokens": "many", "completion_tokens": None}, None, {"prompt_tokens": True, "completion_tokens": 1.5}])
def test_absurd_counts_do_no_harm(usage):
    with Server(usage=usage) as server:
        agent = policy(server)
        t = rollout(agent, MultiStepRetail, [0])[0]
    assert t.success and 0 < t.metadata["tokens"] < 100_000 and 0 < agent.server.ledger.completion_tokens < 10_000


def test_a_full_context_and_a_cut_answer_are_the_agents_limits():
    with Server(lambda body, message, n: (400, "This model's maximum context length is 4096 tokens.", {}) if n == 1 else message | {"finish": "length"}) as server:
        played = [rollout(policy(server), MultiStepRetail, [s])[0] for s in (0, 1)]
    assert [t.termination for t in played] == ["max_turns"] * 2 and all(t.metadata["truncated"] for t in played)


def test_unreadable_arguments_stay_words():
    def broken(body, message, n): return {"role": "assistant", "content": "", "tool_calls": [{"id": "x", "type": "function", "function": {"name": "get_order_details", "arguments": '{"order_id": '}}]}
    with Server(broken) as server: t = rollout(policy(server), MultiStepRetail, [0])[0]
    assert not any(m.get("tool_calls") for m in t.messages) and t.metadata["broken_calls"] == t.metadata["calls"] > 0


def test_a_stopped_run_pays_once(tmp_path):
    with Server() as server:
        first = rollout(policy(server, cache=tmp_path/"answers.sqlite"), MultiStepRetail, range(3), group_size=2)
        asked = len(server.bodies)
        again = rollout(policy(server, cache=tmp_path/"answers.sqlite"), MultiStepRetail, range(3), group_size=2)
    assert [t.to_dict() for t in first] == [t.to_dict() for t in again] and len(server.bodies) == asked > 6
    assert SECRET.encode() not in (tmp_path/"answers.sqlite").read_bytes()
