"A scripted author on 127.0.0.1 that first sends what must not be accepted: each is rejected for the reason that is its own."
import json

import pytest

from endpoint_server import EndpointServer, text_of
from trace_nb.core.endpoint import Budget, BudgetSpent
from trace_nb.core.policy import load_policy
from trace_nb.core.rollout import rollout
from trace_nb.core.trajectory import InputError, Trajectory, write_json, write_trajectories
from trace_nb.synthesize import generator, sandbox, sanity
from trace_nb.synthesize.generator import EXAMPLE, generate, generated, judge, lint

try: sandbox.mechanism(); MISSING = None
except InputError as e: MISSING = str(e)
needs_sandbox = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))

SECRET = "sk-a-key-that-must-not-leak-0123456789"
RIGHT = EXAMPLE.replace('"policy_compliance"', '"refusing"')
WRONG = RIGHT.replace('("told", 0.4)', '("told", 0.3)')
CHEATING = RIGHT.replace("return sum(", 'return 0.5 if "sorry" in " ".join(self._said) else sum(')
ESCAPING = RIGHT.replace("    def _draw(self, rng):", "    def _draw(self, rng):\n        import os; os.listdir('/')")
HANGING = RIGHT.replace("    def _draw(self, rng):", "    def _draw(self, rng):\n        while rng: pass")


def few(cls, policy=None):
    "Three of the checks on a few seeds; the notebook runs all of them."
    work = {"oracle_max": lambda: sanity.oracle_max(cls, range(6)), "adversarial_floor": lambda: sanity.adversarial_floor(cls, range(6)),
            "determinism": lambda: generator._determinism(cls, list(range(3)))}
    return {"checks": [sanity.run_check(name, check) for name, check in work.items()]}


@pytest.fixture(autouse=True)
def key(monkeypatch): monkeypatch.setenv("OPENAI_API_KEY", SECRET)


@pytest.fixture
def skill(tmp_path):
    "A capability file."
    write_json({"name": "refusing", "description": "Refuse what the rules forbid.", "selected": True, "examples": ["desk:retail/7/0"]}, tmp_path/"skill.json")
    return tmp_path/"skill.json"


def author(*versions):
    "A server that sends one version after the other."
    left = list(versions)
    return EndpointServer(reply=lambda body: f"Here it is:\n```python\n{left.pop(0)}```")


def ask(skill, server, out, **options):
    return generate(skill, server.url, out, "scripted", **{"domain": "retail", "check": few, "wait": .01, **options})


@needs_sandbox
def test_three_rejected_for_their_reason_then_one_accepted(skill, tmp_path):
    out = tmp_path/"out"
    with author(WRONG, CHEATING, ESCAPING, RIGHT) as server: text = ask(skill, server, out)
    assert "refusing: CancelWhatCanBe accepted at version 4" in text and "4 requests" in text
    record = json.loads((out/"refusing.json").read_text())
    names = [sorted({f["name"] for f in a["faults"]}) for a in record["attempts"]]
    assert names == [["oracle_max"], ["adversarial_floor"], ["lint"], []]
    assert "apologise earns 0.5" in record["attempts"][1]["faults"][0]["detail"] and "import of os" in record["attempts"][2]["faults"][0]["detail"]
    assert "- oracle_max:" in text_of(server.bodies[1]) and "apologise earns 0.5" in text_of(server.bodies[2]) and "import of os" in text_of(server.bodies[3])
    assert [len(b["messages"]) for b in server.bodies] == [2, 4, 4, 4]      # the last version and its faults, not all of them

    assert (out/"refusing.py").read_text() == RIGHT
    assert record["accepted"] and record["model"] == "scripted" and len(record["prompt_sha256"]) == 64 and record["sandbox"] in sandbox.MECHANISMS
    assert {c["name"]: c["passed"] for c in record["checks"]}["determinism"] is True
    assert not any(SECRET.encode() in f.read_bytes() for f in out.iterdir())

    played = rollout(load_policy("oracle"), generated(out/"refusing.py"), range(5))
    assert [(t.reward, t.termination) for t in played] == [(1., "done")] * 5

    with author() as server: again = ask(skill, server, out)                # nothing is left to say, and nothing is asked
    assert not server.bodies and "4 answers from the cache" in again


@needs_sandbox
def test_rejected_leaves_reasons_and_what_was_there(skill, tmp_path):
    out = tmp_path/"out"; out.mkdir()
    for name in ("refusing.py", "refusing.json"): (out/name).write_text("earlier")
    with author(HANGING, "class A(: pass\n", RIGHT.replace('"refusing"', '"else"')) as server: text = ask(skill, server, out, repairs=2)
    assert "rejected after 3 versions, last for contract" in text
    record = json.loads((out/"refusing.rejected.json").read_text())
    assert [[f["name"] for f in a["faults"]] for a in record["attempts"]] == [["environment"], ["lint"], ["contract"]]
    assert "no answer within 2 seconds" in record["attempts"][0]["faults"][0]["detail"] and record["attempts"][0]["source"] == HANGING
    assert (out/"refusing.py").read_text() == (out/"refusing.json").read_text() == "earlier"


@needs_sandbox
@pytest.mark.parametrize("attack", ["open('/etc/passwd').read()", "__import__('os').fork()", "__import__('socket')", "__import__('os').kill(__import__('os').getppid(), 9)"])
def test_escape_that_no_lint_sees(monkeypatch, attack):
    monkeypatch.setattr(generator, "lint", lambda source: [])
    at_import, later = f"{attack}\n{RIGHT}", RIGHT.replace("    def _draw(self, rng):", f"    def _draw(self, rng):\n        {attack}")
    for source, name in ((at_import, "load"), (later, "environment")):
        (fault,), checks = judge(source, "refusing", "retail", few)
        assert fault["name"] == name and checks is None
        assert "Operation not permitted" in fault["detail"] or "No module named" in fault["detail"]


@needs_sandbox
@pytest.mark.parametrize("old, new, name", [
    ('wanted = rng.choice(', 'wanted = " ".join({"Cancel", "please", "now", "and", "all"}) + rng.choice(', "determinism"),
    ("return {\"looked\"", "return 1 / 0 or {\"looked\"", "environment"),
])
def test_other_faults(old, new, name):
    assert old in RIGHT
    faults, _ = judge(RIGHT.replace(old, new), "refusing", "retail", few)
    assert [f["name"] for f in faults] == [name]


@needs_sandbox
def test_examples_reach_the_author(skill, tmp_path):
    talk = [{"role": "user", "content": "Cancel the blue tent."}, {"role": "assistant", "content": "I am a teapot."}]
    write_trajectories([Trajectory(f"desk:retail/{n}/0", str(n), 0, n, "desk:retail", "p", talk if n == 7 else talk[:1], success=False, metadata={"domain": "retail"}) for n in (6, 7)], tmp_path/"t.jsonl")
    with author(RIGHT) as server: ask(skill, server, tmp_path/"out", trajectories=tmp_path/"t.jsonl", domain="", check=lambda cls, policy: {"checks": []})
    said = text_of(server.bodies[0])
    assert "I am a teapot." in said and "Episode 2" not in said and "Refuse what the rules forbid." in said and "get_order_details" in said


# What is wrong with the question is said before it is asked.

@pytest.mark.parametrize("content, options, words", [
    (None, {}, "no such file"), ({"name": "../up"}, {}, "name of letters"), ([1], {}, "name of letters"), ({"capabilities": [{"name": "a", "selected": False}]}, {}, "no capability is selected"),
    ({"name": "a"}, {"domain": ""}, "which domain"), ({"name": "a"}, {"domain": "moon"}, "no domain 'moon'"),
])
def test_bad_input(tmp_path, content, options, words):
    if content is not None: write_json(content, tmp_path/"skill.json")
    with author() as server:
        with pytest.raises(InputError) as refusal: ask(tmp_path/"skill.json", server, tmp_path/"out", **options)
    assert words in str(refusal.value) and "\n" not in str(refusal.value) and not server.bodies and not (tmp_path/"out").exists()


def test_no_sandbox_no_question(skill, tmp_path, monkeypatch):
    def refuse(): raise InputError("no sandbox on this machine (landlock: absent); generated code was not run")
    monkeypatch.setattr(generator, "mechanism", refuse)
    with author() as server:
        with pytest.raises(InputError, match="no sandbox on this machine"): ask(skill, server, tmp_path/"out")
    assert not server.bodies and not (tmp_path/"out").exists()


@needs_sandbox
def test_budget(skill, tmp_path):
    with author() as server:
        with pytest.raises(BudgetSpent): ask(skill, server, tmp_path/"out", budget=Budget(tokens=1000))
    assert not server.bodies and not list((tmp_path/"out").glob("refusing*"))


@needs_sandbox
def test_nothing_generated(tmp_path):
    write_json({"accepted": False}, tmp_path/"a.json")
    with pytest.raises(InputError, match="no accepted environment"): generated(tmp_path/"a.py")


# The lint: ways out of Python that a list of words would miss.

ESCAPES = """import os|import sys|from os import system|import socket as s|import subprocess|from . import x|import importlib|import builtins|import ctypes|import time
import dataclasses; dataclasses.sys|from json import codecs|from random import _os|import json; json.decoder|from enum import sys|import re; re.enum|import json as j; j.scanner
import random; random.seed(1)|import random; random.SystemRandom()|from random import *|import collections; x = collections|import trace_nb.targets.domains|from datetime import datetime; datetime.now()
eval("1")|exec("1")|open("x")|compile("1", "", "eval")|__import__("os")|getattr(1, "real")|setattr(f, "a", 1)|vars()|globals()|locals()|dir()|input()|breakpoint()|help()|print(1)|hash("a")|id(1)
e = eval|(lambda: open)()|[eval][0]("1")|().__class__|"".__class__.__mro__|f.__globals__|f"{f.__code__}"|"{0.__class__}".format(f)|"{a}".format_map({})|str.format("{0.__class__}", 1)
(i for i in ()).gi_frame|type("A", (), {})|t = type|type.mro(int)|x._secret|Exception().with_traceback(None)|global g; g = 1|__builtins__|__name__|__loader__""".replace("\n", "|").split("|")


@pytest.mark.parametrize("escape", ESCAPES)
def test_lint_sees(escape): assert lint(f"def f(x=0):\n    {escape}\n"), escape


@pytest.mark.parametrize("source", ["while True: pass", "for i in (): pass", "f()", "class A(metaclass=type): pass", "class A:\n    def __getattr__(self, n): pass", "async def f(): pass",
                                    "def f(x):\n    match x:\n        case object(__class__=c): return c", "def f(eval): return eval", "class A:\n    __slots__ = ()", "x = 1 +", "a\0b", "(" * 500 + ")" * 500])
def test_lint_sees_at_the_top(source): assert lint(source)


@pytest.mark.parametrize("source", [EXAMPLE, RIGHT, HANGING, "class A:\n    def __init__(self): super().__init__(); self._a = type(self)", "from datetime import date, timedelta\nD = date(2024, 5, 15) + timedelta(days=1)"])
def test_lint_lets_pass(source): assert lint(source) == []
