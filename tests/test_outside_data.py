"Other people's data: both generations of ADP, and AWM applications in the sandbox."
import gzip, json, shutil
from pathlib import Path

import pytest

from trace_nb.core.environment import replay
from trace_nb.core.trajectory import InputError
from trace_nb.synthesize.sandbox import EnvironmentFault, mechanism
from trace_nb.train.outside_data import ADP, AWM, NO_DATA, adp_status, awm_status, library_folders, operations, scenario_key

FIXTURES = Path(__file__).parent/"fixtures"
STEPS = [{"name": "list_plants", "arguments": {}}, {"name": "water_plant", "arguments": {"plant_id": 1, "litres": 1}}, "The fern was last watered on day 3."]


@pytest.fixture(scope="module")
def sandbox():
    try: return mechanism()
    except InputError as e: pytest.skip(str(e))


def test_adp_both_generations():
    adp = ADP(FIXTURES/"adp", thoughts=False)
    kept = list(adp)
    assert [t.task_id for t in kept] == ["new-1", "new-2", "old-1"] and not any("reasoning_content" in m for t in kept for m in t.messages)
    assert dict(adp.report["rejected"]) == {"holds a web_observation": 1, "a call without its result": 1}
    assert adp.report["sources"]["parcels"] == {"licence": "MIT License", "read": 5, "kept": 3} and kept[0].metadata["licence"] == "MIT License"
    assert kept[0].tools[0]["function"]["description"] == "The weather of a city." and kept[0].metadata["inferred_tools"] == ["map"]
    assert kept[2].messages[2]["tool_call_id"] == kept[2].messages[1]["tool_calls"][0]["id"] and kept[2].reward == 1.0
    assert "reasoning_content" in next(iter(ADP(FIXTURES/"adp"))).messages[1]


def test_adp_bad_lines_are_counted_not_fatal(tmp_path):
    lines = ['{"id": "x"', json.dumps({"id": "y", "content": "no"}), json.dumps({"schema_version": "2.0", "id": "z", "content": []}), (FIXTURES/"adp"/"parcels"/"full_std.jsonl").read_text().splitlines()[0]]
    with gzip.open(tmp_path/"mixed.jsonl.gz", "wt") as f: f.write("\n".join([lines[3], *lines[:3]]))
    adp = ADP(tmp_path/"mixed.jsonl.gz")
    assert len(list(adp)) == 1 and adp.report["read"] == 4 and len(adp.report["rejected"]) == 3 and adp.report["sources"][tmp_path.name]["licence"] == "not stated"
    assert list(ADP(tmp_path, shares={tmp_path.name: 0.})) == []


def test_no_data(tmp_path):
    assert (adp_status(tmp_path/"none"), awm_status(tmp_path), awm_status(None)) == (NO_DATA,) * 3
    with pytest.raises(InputError, match="no ADP file"): ADP(tmp_path)
    with pytest.raises(InputError, match="not run: no data"): AWM(tmp_path)


def test_awm_plays_in_the_sandbox(sandbox):
    awm = AWM(FIXTURES/"awm", scenarios=["Plant Shelf 1"])
    (cls, seed), = awm.tasks()
    assert scenario_key("Plant  Shelf-1") == "plant_shelf_1" and awm.report["without_code_verifier"] == 1
    assert [replay(cls, seed, s).reward for s in (STEPS, STEPS[:2] + ["Done."], STEPS[2:])] == [1., 0., 0.]


def test_awm_clock_stands_still(sandbox, tmp_path):
    "An application that says what time it is, by Python's clocks and by the database's, and a verifier that looks at the clock too."
    folder = shutil.copytree(FIXTURES/"awm", tmp_path/"awm")
    def change(name, key, new):
        record = json.loads((folder/f"{name}.jsonl").read_text().splitlines()[0]); place = record if key in record else record["verification"]
        place[key] = new(place[key]); (folder/f"{name}.jsonl").write_text(json.dumps(record))
    clocks = "import datetime, time\n        return 200, [str(datetime.datetime.now()), str(datetime.date.today()), time.time(), time.strftime('%H:%M', time.localtime()), *database.execute(\"SELECT CURRENT_TIMESTAMP, date('now', '+1 day'), strftime('%Y')\").fetchone()]\n        "
    change("gen_envs", "full_code", lambda code: code.replace('if path == "/plants": return', clocks + "return"))
    change("gen_verifier.pure_code", "code", lambda code: "import datetime\ndef verify_task_completion(initial, final, answer=''): return {'result': 'complete' if datetime.datetime.utcnow().isoformat() == '2024-06-03T12:00:00' else 'not'}")
    (cls, seed), = AWM(folder).tasks()
    played = replay(cls, seed, STEPS[:1] + ["Noon."])
    assert json.loads(played.messages[3]["content"]) == ["2024-06-03 12:00:00", "2024-06-03", 1717416000.0, "12:00", "2024-06-03 12:00:00", "2024-06-04", "2024"] and played.reward == 1.


def test_awm_code_cannot_reach_out(sandbox, tmp_path):
    "A foreign application that reads a file on start never becomes an environment."
    folder = shutil.copytree(FIXTURES/"awm", tmp_path/"awm")
    record = json.loads((folder/"gen_envs.jsonl").read_text())
    record["full_code"] = "open('/etc/passwd').read()\n" + record["full_code"]
    (folder/"gen_envs.jsonl").write_text(json.dumps(record))
    awm = AWM(folder)
    assert awm.tasks() == [] and "PermissionError" in awm.report["skipped"]["plant_shelf_1"]


def test_awm_fastapi(sandbox):
    if not library_folders():
        assert awm_status(FIXTURES/"awm_fastapi") == "not run: needs fastapi and sqlalchemy in the sandbox"
        pytest.skip("the rest needs fastapi and sqlalchemy: pip install fastapi sqlalchemy")
    (cls, seed), = AWM(FIXTURES/"awm_fastapi").tasks()
    played = replay(cls, seed, STEPS)
    assert played.reward == 1. and json.loads(played.messages[5]["content"])["watered"] == 1.
    refused = replay(cls, seed, [{"name": "water_plant", "arguments": {"plant_id": 1, "litres": -1}}, "No."])
    assert refused.messages[3]["content"].startswith("Error: ") and refused.reward == 0.


def test_operations_flatten_references():
    api = {"paths": {"/a/{id}": {"post": {"operationId": "make.it", "parameters": [{"name": "id", "in": "path", "required": True, "schema": {"type": "integer"}}, {"name": "X", "in": "header"}],
           "requestBody": {"content": {"application/json": {"schema": {"$ref": "#/components/schemas/B"}}}}}}}, "components": {"schemas": {"B": {"properties": {"n": {"anyOf": [{"type": "null"}, {"type": "number"}]}, "id": {"type": "string"}}}}}}
    (op,) = operations(api)
    assert (op["name"], [(n, place, kind, needed) for n, place, kind, needed, _ in op["fields"]]) == ("make_it", [("id", "path", int, True), ("n", "body", float, False)])
