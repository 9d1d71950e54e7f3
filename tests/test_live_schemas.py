"Our tables of the targets' interfaces against schemas that the benchmarks themselves wrote."
import json, os
from pathlib import Path

import pytest

from trace_nb.core.environment import tool_schemas
from trace_nb.synthesize.capabilities import ALL_ENVIRONMENTS
from trace_nb.targets.interface import _tabled, declared, interface
from trace_nb.targets.live_schemas import live_differences, live_schemas, schema_differences
from trace_nb.targets.tau2 import tau2_fault

DATA = Path(os.environ.get("TRACE_NB_SHARED", Path(__file__).parents[2]/"shared"))/"data"
CLASSES = [c for classes in ALL_ENVIRONMENTS.values() for c in classes]


def recorded(domain):
    name = "toolsandbox_tool_schemas.json" if domain == "phone" else "tau2_tool_schemas.json"
    if not (DATA/name).exists(): pytest.skip(f"{name}, schemas written by the benchmark at run time, is not here")
    given = json.loads((DATA/name).read_text())
    return given["agent_tools"] if domain == "phone" else given["domains"][domain]["tools"]


def table(domain): return {name: _tabled(tool) for name, tool in interface(domain)["tools"].items()}
def own(cls): return {s["function"]["name"]: declared(s) for s in tool_schemas(cls)}


@pytest.mark.parametrize("domain", ["airline", "retail", "phone"])
def test_tables_and_environments_agree_with_recorded_schemas(domain):
    schemas = recorded(domain)
    assert schema_differences(table(domain), schemas, whole=True) == []
    assert {c.__name__: schema_differences(own(c), schemas) for c in CLASSES if c.domain == domain} == {c.__name__: [] for c in CLASSES if c.domain == domain}


def test_a_changed_table_is_noticed():
    schemas, changed = recorded("airline"), table("airline")
    changed["send_certificate"]["amount"] = ("string", False)
    del changed["cancel_reservation"]["reservation_id"], changed["calculate"]
    assert schema_differences(changed, schemas, whole=True) == ["tool calculate is missing", "cancel_reservation: parameter reservation_id is missing",
        'send_certificate: parameter amount is "string", optional; the target\'s is "integer", required']


@pytest.mark.skipif(tau2_fault() is not None, reason=str(tau2_fault()))
@pytest.mark.parametrize("domain", ["airline", "retail"])
def test_the_installed_package_agrees(domain):
    assert live_differences(domain) == [] and [live_differences(domain, c) for c in CLASSES if c.domain == domain] == [[]] * sum(c.domain == domain for c in CLASSES)


def test_what_is_not_installed_differs_in_nothing(monkeypatch):
    monkeypatch.delenv("TRACE_NB_TOOLSANDBOX", raising=False); live_schemas.cache_clear()
    assert live_schemas("phone") is None and live_differences("phone") == []


def test_schemas_of_a_tree_are_asked(monkeypatch):
    from trace_nb.targets import toolsandbox
    monkeypatch.setenv("TRACE_NB_TOOLSANDBOX", str(Path(__file__).parent/"toolsandbox_tree")); live_schemas.cache_clear()
    assert [s["function"]["name"] for s in live_schemas("phone")] == ["add_note", "drop", "notes", "set_wifi_status"]
    differences = live_differences("phone")
    assert "the target has no tool add_contact" in differences and not any("set_wifi_status" in d for d in differences)
    live_schemas.cache_clear()
    for w in toolsandbox._workers: w.stop()
