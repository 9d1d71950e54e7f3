"A cold start: an agent without logs is played on the environments, and a run begins from what it fails there."
import json
import pytest
from trace_nb.cli import main
from trace_nb.core.policy import load_policy
from trace_nb.core.trajectory import InputError, data_folder, read_trajectories
from trace_nb.diagnose.labeling import label_file
from trace_nb.diagnose.probe import judge_probe, play_probe, probe_record, probe_table
from trace_nb.pipeline import Parameters, run_loop
from trace_nb.synthesize.capabilities import ENVIRONMENTS


@pytest.fixture(scope="module")
def played():
    "The library as the oracle and as an idle agent play it: pairs of the same seed and trial."
    return list(zip(*(play_probe(load_policy(name), ENVIRONMENTS, 24, 2) for name in ("oracle", "do_nothing"))))


@pytest.mark.parametrize("lacking", sorted(ENVIRONMENTS))
def test_the_one_capability_that_is_lacking(played, lacking):
    "An agent that fails half of one capability's rollouts and none of the others."
    found = judge_probe([idle if idle.metadata["capability"] == lacking and i % 2 else gold for i, (gold, idle) in enumerate(played)])
    assert [e["name"] for e in found if e["selected"]] == [lacking] and found[0]["name"] == lacking
    assert found[0]["success"] == .5 and found[0]["informative"] == 1 and found[0]["seeds"] == 24 and found[0]["interval"][1] < .75
    assert {e["success"] for e in found[1:]} == {1.}


def test_what_is_never_won_is_named_and_not_selected(played):
    found = judge_probe([idle for _, idle in played])
    assert not any(e["selected"] for e in found) and all(e["evidence"].startswith("lacking, but") for e in found)


def test_two_environments_of_one_seed_are_two_tasks(played):
    found = {e["name"]: e for e in judge_probe([gold for gold, _ in played])}
    assert all(e["seeds"] == 24 and e["trials"] == 48 for e in found.values())
    assert max(len(e["environments"]) for e in found.values()) == 2


def test_unreadable_calls_are_said(played):
    from dataclasses import replace
    spoilt = [replace(gold, metadata=gold.metadata | {"calls": 4, "broken_calls": 3}) for gold, _ in played]
    assert "more than a tenth of the calls could not be read" in probe_table(probe_record(spoilt))
    assert "warning" not in probe_table(probe_record([gold for gold, _ in played]))


def test_faults_of_the_infrastructure_are_no_deficit(played):
    from dataclasses import replace
    down = [replace(gold, termination="policy_error", success=False, reward=0.) for gold, _ in played]
    with pytest.raises(InputError, match="no rollout of the probe came to a verdict"): judge_probe(down)
    half = judge_probe([d if i % 2 else gold for i, (d, (gold, _)) in enumerate(zip(down, played))])
    assert {e["success"] for e in half} == {1.} and {e["trials"] for e in half} == {24}


def test_the_command(tmp_path, capsys):
    assert main(["probe", "--policy", "oracle", "--seeds", "2", "--trials", "2", "--out", str(tmp_path/"p"), "--json", str(tmp_path/"p.json")]) == 0
    rows = json.loads((tmp_path/"p.json").read_text())["rows"]
    assert rows == json.loads((tmp_path/"p"/"selected_capabilities.json").read_text())["capabilities"] and len(rows) == 4
    log = tmp_path/"p"/"trajectories.jsonl"
    assert len(read_trajectories(log)) == 16 and label_file(log, tmp_path/"labels", 2, 0, "rules")
    before = log.read_bytes()
    capsys.readouterr()
    assert main(["probe", "--policy", "oracle", "--out", str(tmp_path/"p")]) == 2 and "exists already" in capsys.readouterr().err
    assert log.read_bytes() == before


def test_an_agent_that_cannot_be_reached_is_no_deficit():
    class Gone:
        name = "gone"
        def begin(self, conversations, seed):
            for c in conversations: c.fault = "nobody there"
        def act(self, conversations): return [{"role": "assistant", "content": ""}] * len(conversations)
    with pytest.raises(InputError, match="gone: no rollout of the probe came to a verdict"): play_probe(Gone(), ENVIRONMENTS, 2, 2)


@pytest.mark.parametrize("words, said", [(["--seeds", "1"], "at least 2"), (["--limit", "nan"], "--limit"), (["--limit", "2"], "--limit"), (["--target", "moon"], "moon"),
                                         (["--policy", "http://127.0.0.1:9/v1"], "--model is missing"), (["--policy", "no/such/model"], "no/such/model")])
def test_bad_input_is_one_line(tmp_path, capsys, words, said):
    assert main(["probe", "--out", str(tmp_path/"p"), *words]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1 and not (tmp_path/"p").exists()


@pytest.mark.skipif(not (data_folder()/"pocket"/"config.json").exists(), reason="data/pocket has no weights: run `make pocket`")
def test_a_run_from_cold(tmp_path):
    folder, lines = tmp_path/"run", []
    result = run_loop(folder, Parameters(scale="smoke"), lines.append, cold=True)
    found = json.loads((folder/"capabilities.json").read_text())
    assert found["probe"]["rollouts"] == 32 and {c["name"] for c in found["capabilities"]} == set(ENVIRONMENTS)
    assert list(result["seconds"])[:2] == ["probe", "base"] and result["budget"]["probe"]["rollouts"] == 32
    assert (folder/"figures"/"probe.svg").exists() and "informative seeds" in (folder/"report.html").read_text() and not (folder/"labels").exists()
    manifest = (folder/"manifest.json").read_bytes()
    with pytest.raises(InputError, match="was begun with --cold-start"): run_loop(folder, Parameters(scale="smoke"), lines.append)
    assert (folder/"manifest.json").read_bytes() == manifest
    lines.clear(); run_loop(folder, Parameters(scale="smoke"), lines.append, cold=True)
    assert sum("already done" in line for line in lines) == len(result["seconds"])
