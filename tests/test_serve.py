"`trace-nb serve` against the official client: chat, tools, streams, routes of many clients at once, and the same words as offline."
import json, os, re, signal, subprocess, sys, threading, time
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("fastapi", reason="serving needs the extra [serve]")
uvicorn = pytest.importorskip("uvicorn", reason="serving needs the extra [serve]")
import openai, torch
from peft import LoraConfig, get_peft_model

from trace_nb.adapt.serve import Engine, Upstream, application, chooser, listening, serve, served_adapters
from trace_nb.core.environment import Episode, tool_schemas
from trace_nb.core.policy import Conversation, Local, load_model, load_policy, with_adapters
from trace_nb.core.rollout import play, rollout
from trace_nb.core.trajectory import InputError
from trace_nb.synthesize.capabilities import MultiStepRetail, PreconditionAirline

FIRST, SECOND = "multi_step_task_completion", "precondition_verification"
TOOLS = tool_schemas(MultiStepRetail)


class Listed:
    "A router by the words' own hash, so that three routes occur."
    def choose(self, model, tokenizer, texts): return [route_of(t) for t in texts]


def route_of(text): return ("base", FIRST, SECOND)[sum(text.encode()) % 3]


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    "A folder with two small adapters that change what is said."
    folder, (model, _) = tmp_path_factory.mktemp("run")/"adapters", load_model("pocket")
    for n, name in enumerate((FIRST, SECOND)):
        torch.manual_seed(n)
        tuned = get_peft_model(model, LoraConfig(r=2 + n, lora_alpha=4, target_modules=["q_proj", "v_proj", "up_proj"], init_lora_weights=False))
        tuned.save_pretrained(folder/name); model = tuned.unload()
    return folder


@pytest.fixture(scope="module")
def offline(adapters):
    "The policy of an offline evaluation."
    return load_policy("pocket", {n: adapters/n for n in (FIRST, SECOND)}, temperature=0.)


@pytest.fixture(scope="module")
def engine(adapters):
    model, tokenizer = load_model("pocket")
    choose = chooser(model, tokenizer, {FIRST: "a", SECOND: "b"}, make=lambda *_: Listed())
    engine = Engine(Local(with_adapters(model, {n: adapters/n for n in (FIRST, SECOND)}), tokenizer), choose, (FIRST, SECOND), "pocket")
    yield engine
    engine.close()


class running:
    "An application on a free port of the loopback."
    def __init__(self, app):
        self.socket, self.server = listening("127.0.0.1", 0, None), uvicorn.Server(uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=1))
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}/v1"
    def __enter__(self):
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [self.socket]}, daemon=True); self.thread.start()
        return self
    def __exit__(self, *_): self.server.should_exit = True; self.thread.join(10)
    def client(self, key="none", **options): return openai.OpenAI(base_url=self.url, api_key=key, **options)


@pytest.fixture(scope="module")
def served(engine):
    with running(application(engine)) as server: yield server


def openings(n):
    "First messages of n episodes."
    return [Episode((MultiStepRetail, PreconditionAirline)[s % 2], s).messages for s in range(n)]


def said_offline(offline, talks, adapters):
    conversations = [Conversation(Episode((MultiStepRetail, PreconditionAirline)[s % 2], s), a) for s, a in zip(range(len(talks)), adapters)]
    offline.begin(conversations)
    return offline.act(conversations), [(len(c.ids) - sum(c.mask), sum(c.mask)) for c in conversations]


def plain(message):
    calls = [(c.function.name, json.loads(c.function.arguments)) for c in message.tool_calls or []]
    return message.content or None, calls


def plain_offline(m): return m["content"] or None, [(c["function"]["name"], c["function"]["arguments"]) for c in m.get("tool_calls") or []]


def ask(client, messages, task=0, **options):
    tools = tool_schemas((MultiStepRetail, PreconditionAirline)[task % 2])
    return client.chat.completions.create(**({"model": "pocket", "messages": messages, "tools": tools, "temperature": 0} | options))


def test_200_clients_with_mixed_routes_get_what_offline_evaluation_says(served, offline):
    talks = openings(200)
    routes = [route_of(t[1]["content"]) for t in talks]
    assert set(routes) == {"base", FIRST, SECOND}
    client = served.client(max_retries=0)
    with ThreadPoolExecutor(200) as pool:
        raw = list(pool.map(lambda s: client.chat.completions.with_raw_response.create(model="pocket", messages=talks[s], tools=tool_schemas((MultiStepRetail, PreconditionAirline)[s % 2]), temperature=0), range(200)))
    assert [r.headers["x-trace-route"] for r in raw] == routes
    messages, counts = said_offline(offline, talks, [None if r == "base" else r for r in routes])
    answers = [r.parse() for r in raw]
    assert [plain(a.choices[0].message) for a in answers] == [plain_offline(m) for m in messages]
    assert [(a.usage.prompt_tokens, a.usage.completion_tokens) for a in answers] == counts
    assert len({str(plain_offline(m)) for m in messages}) > 50 and "tool_calls" in {a.choices[0].finish_reason for a in answers}


def test_whole_episodes_are_the_same(served, offline):
    "Our own client plays the server: every turn as offline, parallel and routed."
    seeds = range(12)
    routes = [route_of(MultiStepRetail().reset(seed=s)) for s in seeds]
    remote = rollout(load_policy(served.url, model="pocket", temperature=0.), MultiStepRetail, seeds)
    local = rollout(offline, MultiStepRetail, seeds, adapters=[None if r == "base" else r for r in routes])
    assert [t.messages for t in remote] == [t.messages for t in local] and [t.reward for t in remote] == [t.reward for t in local]
    assert max(len(t.messages) for t in local) > 6 and {t.termination for t in remote} <= {"done", "max_turns"}


@pytest.mark.parametrize("seed", [0, 1, 2, 5])
def test_a_stream_says_the_same(served, seed):
    client, messages = served.client(), openings(seed + 1)[seed]
    whole = ask(client, messages, seed).choices[0]
    chunks = list(ask(client, messages, seed, stream=True, stream_options={"include_usage": True}))
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    calls = [call for c in chunks if c.choices for call in c.choices[0].delta.tool_calls or []]
    assert (text.strip() or None) == (whole.message.content or "").strip() or not text
    assert [(c.function.name, c.function.arguments) for c in calls] == [(c.function.name, c.function.arguments) for c in whole.message.tool_calls or []]
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == whole.finish_reason and chunks[-1].usage.completion_tokens > 0


def test_models_and_health(served):
    client = served.client()
    assert [m.id for m in client.models.list()] == ["pocket", "base", FIRST, SECOND]
    raw = client.chat.completions.with_raw_response.create(model=SECOND, messages=[{"role": "user", "content": "Hello"}], max_tokens=4)
    assert raw.headers["x-trace-route"] == SECOND and raw.parse().usage.completion_tokens <= 4
    import urllib.request
    assert json.load(urllib.request.urlopen(served.url.removesuffix("/v1") + "/health"))["status"] == "ok"


def test_sampling_repeats_with_a_seed(served):
    client, messages = served.client(), openings(1)[0]
    drawn = [plain(ask(client, messages, temperature=2., seed=s).choices[0].message) for s in (1, 1)]
    with ThreadPoolExecutor(8) as pool: crowd = list(pool.map(lambda s: plain(ask(client, messages, temperature=2., seed=s).choices[0].message), [1, 2, 3, 4, 5, 1, 6, 7]))
    assert drawn[0] == drawn[1] == crowd[0] == crowd[5] and len({str(c) for c in crowd}) > 1


@pytest.mark.parametrize("change, error, said", [({"model": "gpt"}, openai.NotFoundError, "known: pocket"), ({"messages": []}, openai.BadRequestError, "messages"), ({"n": 3}, openai.BadRequestError, "n is not supported"),
                                                 ({"messages": [{"role": "user", "content": "word " * 4000}]}, openai.BadRequestError, "maximum context length"), ({"tools": [{"a": 1}]}, openai.BadRequestError, "tools")])
def test_faults_of_the_client(served, change, error, said):
    with pytest.raises(error, match=said): ask(served.client(max_retries=0), **({"messages": openings(1)[0]} | change))


def test_too_many_are_told_to_come_back(engine):
    with running(application(engine, max_concurrent=1)) as server:
        engine.open += 1
        try:
            with pytest.raises(openai.RateLimitError) as caught: ask(server.client(max_retries=0), openings(1)[0])
        finally: engine.open -= 1
        assert caught.value.response.headers["retry-after"] == "1" and ask(server.client(), openings(1)[0])


def test_a_key_is_asked_for(engine):
    with running(application(engine, key="sesame")) as server:
        with pytest.raises(openai.AuthenticationError): server.client("wrong").models.list()
        assert server.client("sesame").models.list().data


def test_a_client_that_leaves_stops_its_answer(engine, served, monkeypatch):
    "The model would talk for over a thousand tokens; from the 50th on it waits for the news that the client has gone, however busy the machine is."
    monkeypatch.setattr(engine.policy, "stops", set())
    written, finished, listener = [], engine._finished, engine._listener
    def patient(a):
        hear, heard = listener(a), []
        def hear_and_wait(token):
            heard.append(token)
            until = time.time() + 60
            while len(heard) == 50 and not a.left and time.time() < until: time.sleep(.01)
            return hear(token)
        return hear_and_wait
    monkeypatch.setattr(engine, "_listener", patient)
    monkeypatch.setattr(engine, "_finished", lambda a, ids: written.append(len(ids)) or finished(a, ids))
    stream = ask(served.client(), openings(1)[0], stream=True, max_tokens=1200, tools=openai.NOT_GIVEN)
    for n, _ in enumerate(stream):
        if n == 3: break
    stream.close()
    with pytest.raises(openai.APITimeoutError): ask(served.client(timeout=3, max_retries=0), openings(2)[1], max_tokens=1200)
    until = time.time() + 150
    while (len(written) < 2 or engine.open) and time.time() < until: time.sleep(.05)
    assert len(written) == 2 and max(written) <= 50 and engine.open == 0


def test_in_front_of_a_server_with_the_adapters_by_name(served, offline):
    "Our own server plays vLLM."
    upstream = Upstream(served.url, "base", lambda texts: [route_of(t) for t in texts], (FIRST, SECOND), "agent")
    talks, tools = openings(6), [tool_schemas((MultiStepRetail, PreconditionAirline)[s % 2]) for s in range(6)]
    with running(application(upstream)) as front:
        client = front.client()
        raw = [client.chat.completions.with_raw_response.create(model="agent", messages=t, tools=tools[s], temperature=0) for s, t in enumerate(talks)]
        streamed = list(ask(client, talks[0], 0, model="agent", stream=True))
        until = time.time() + 5
        while upstream.open and time.time() < until: time.sleep(.01)      # the client has its last event before the server has closed the request
        assert upstream.open == 0
        with pytest.raises(openai.BadRequestError, match="maximum context length"): ask(client, [{"role": "user", "content": "word " * 4000}], model="agent")
    routes = [route_of(t[1]["content"]) for t in talks]
    assert [r.headers["x-trace-route"] for r in raw] == routes
    assert [plain(r.parse().choices[0].message) for r in raw] == [plain_offline(m) for m in said_offline(offline, talks, [None if r == "base" else r for r in routes])[0]]
    assert streamed[-1].choices[0].finish_reason == raw[0].parse().choices[0].finish_reason


def test_nobody_behind():
    upstream = Upstream("http://127.0.0.1:9/v1", "base", lambda texts: ["base"], (), "agent")
    with running(application(upstream)) as front:
        with pytest.raises(openai.InternalServerError, match="does not answer"): ask(front.client(max_retries=0), openings(1)[0], model="agent")
    assert upstream.open == 0


def test_the_loopback_unless_there_is_a_key(adapters, monkeypatch):
    with pytest.raises(InputError, match="--key-env"): serve(str(adapters), host="0.0.0.0", port=0)
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    with pytest.raises(InputError, match=r"\$NO_SUCH_KEY is empty"): serve(str(adapters), key_env="NO_SUCH_KEY")
    with pytest.raises(InputError, match="no such folder"): serve(str(adapters/"nowhere"))
    assert list(served_adapters(adapters.parent)) == [FIRST, SECOND]


def test_ctrl_c_ends_it(adapters):
    "A process of its own, with the real router."
    code = f"from trace_nb.adapt.serve import serve; serve({str(adapters)!r}, port=0)"
    process = subprocess.Popen([sys.executable, "-u", "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore::FutureWarning"})
    line = process.stdout.readline()
    url = re.search(r"http://\S+/v1", line)[0]
    answer = openai.OpenAI(base_url=url, api_key="none").chat.completions.create(model="pocket", messages=openings(1)[0], tools=TOOLS, temperature=0)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert answer.choices[0].message and process.returncode == 0 and out.strip() == "stopped" and not err


@pytest.mark.parametrize("what, words", [("empty", "no adapter in it"), ("rejected", "every adapter in it was rejected"), ("one", "is itself an adapter")])
def test_a_folder_without_an_adapter_to_serve_is_refused(adapters, tmp_path, what, words, capsys):
    from shutil import copytree
    from trace_nb.cli import main
    from trace_nb.core.trajectory import write_json
    if what == "rejected":
        copytree(adapters/FIRST, tmp_path/FIRST)
        write_json({"name": FIRST, "description": "", "accepted": False, "reason": "no gain", "metrics": {}}, tmp_path/FIRST/"capability.json")
    assert main(["serve", str(adapters/FIRST if what == "one" else tmp_path), "--port", "0"]) == 2
    said = capsys.readouterr().err
    assert words in said and said.count("\n") == 1 and str(adapters/FIRST if what == "one" else tmp_path) in said


@pytest.mark.parametrize("trained", [False, True])
def test_a_run_that_accepted_nothing_serves_its_base_and_says_so(adapters, tmp_path, trained, monkeypatch):
    from shutil import copytree
    from trace_nb.core.trajectory import write_json
    write_json({"parameters": {"model": "pocket"}}, tmp_path/"manifest.json"); (tmp_path/"labels").mkdir(); (tmp_path/"labels"/"run_0.json").write_text("{}")
    if trained:
        copytree(adapters/FIRST, tmp_path/"adapters"/FIRST)
        write_json({"name": FIRST, "description": "", "accepted": False, "reason": "no gain", "metrics": {}}, tmp_path/"adapters"/FIRST/"capability.json")
    with pytest.raises(InputError, match="no adapter|adapter_config"): served_adapters(tmp_path/"labels")
    said = []
    monkeypatch.setattr(uvicorn.Server, "run", lambda self, sockets: None)
    serve(str(tmp_path), port=0, say=said.append)
    assert said[0] == f"the run {tmp_path} accepted no adapter: the base answers everything" and "0 adapters (none)" in said[1] and said[-1] == "stopped"
