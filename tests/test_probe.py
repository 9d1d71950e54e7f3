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
    one = judge_probe([d if d.metadata["capability"] == "precondition_verification" else gold for d, (gold, _) in zip(down, played)])
    assert one[-1]["name"] == "precondition_verification" and one[-1]["success"] is None and one[-1]["evidence"] == "no rollout came to a verdict" and len(one) == 4
    assert "no rollout came to a verdict" in probe_table({"capabilities": one, "probe": {"limit": .75}})
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
    with pytest.raises(InputError, match="gone: no answer to any rollout of multi_step_task_completion .nobody there."): play_probe(Gone(), ENVIRONMENTS, 2, 2)


def test_what_was_cut_is_said(played):
    from dataclasses import replace
    cut = [replace(gold, metadata=gold.metadata | {"truncated": True}) for gold, _ in played]
    assert "ended at a token limit" in probe_table(probe_record(cut))


def test_few_seeds_are_said(played):
    early = [idle for gold, idle in played if int(idle.task_id) < 4_000_002]
    assert {e["seeds"] for e in judge_probe([*early[::2], *[g for g, i in played if int(g.task_id) < 4_000_002][1::2]])} == {2}
    assert all("on 2 seeds only" in e["evidence"] or "no seed" in e["evidence"] for e in judge_probe(early))


def test_a_probe_that_broke_off_goes_on(tmp_path, monkeypatch):
    "An agent that is gone from the third capability on: what was answered stays, and the same command plays the rest."
    from trace_nb.diagnose import probe as p
    real, lines = p.play_probe, []
    def breaks(policy, library, *rest):
        real(policy, dict(list(library.items())[:2]), *rest)
        raise InputError("gone")
    monkeypatch.setattr(p, "play_probe", breaks)
    with pytest.raises(InputError, match="gone"): p.probe_agent("oracle", tmp_path/"p", seeds=2, trials=2, say=lines.append)
    kept = read_trajectories(tmp_path/"p"/"trajectories.jsonl")
    assert len(kept) == 8 and not (tmp_path/"p"/"selected_capabilities.json").exists()
    monkeypatch.undo()
    with pytest.raises(InputError, match="is not of this probe"): p.probe_agent("oracle", tmp_path/"p", seeds=2, trials=2, seed=1, say=lines.append)
    whole, _ = p.probe_agent("oracle", tmp_path/"p", seeds=2, trials=2, say=lines.append)
    assert whole == p.probe_agent("oracle", tmp_path/"other", seeds=2, trials=2, say=lines.append)[0] and any("8 rollouts are there already" in line for line in lines)


@pytest.mark.parametrize("content", ["null", "[1, 2]", "{}"])
def test_a_damaged_manifest_is_one_line(tmp_path, capsys, content):
    (tmp_path/"run").mkdir(); (tmp_path/"run"/"manifest.json").write_text(content)
    assert main(["run", "--scale", "smoke", "--cold-start", "--out", str(tmp_path/"run")]) == 2
    error = capsys.readouterr().err
    assert "manifest.json" in error and error.count("\n") == 1 and (tmp_path/"run"/"manifest.json").read_text() == content


@pytest.mark.parametrize("words, said", [(["--seeds", "1"], "--seeds is 1"), (["--trials", "1"], "--trials is 1"), (["--limit", "nan"], "--limit"), (["--policy", "http://[::1", "--model", "m"], "no address"), (["--limit", "2"], "--limit"), (["--target", "moon"], "moon"),
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
