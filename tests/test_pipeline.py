"""The loop on the shipped agent, small: it ends, resumes after a kill, and says the same in another process."""
import json, os, signal, subprocess, sys, time
from pathlib import Path
import pytest
from trace_nb.core.trajectory import data_folder, read_trajectories

if not (data_folder()/"pocket"/"config.json").exists(): pytest.skip("data/pocket has no weights: run `make pocket`", allow_module_level=True)
CODE = "import sys; from trace_nb.cli import main; sys.exit(main())"


def start(*words, **env):
    return subprocess.Popen([sys.executable, "-c", CODE, *map(str, words)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, **env})


def stages(folder):
    path = Path(folder)/"manifest.json"
    return json.loads(path.read_text())["stages"] if path.exists() else {}


@pytest.fixture(scope="module")
def killed_and_resumed(tmp_path_factory):
    "A smoke run that was killed after its first stages, and then finished by the same command."
    folder = tmp_path_factory.mktemp("runs")/"smoke"
    first = start("run", "--scale", "smoke", "--out", folder)
    while len(stages(folder)) < 2 and first.poll() is None: time.sleep(.1)
    first.send_signal(signal.SIGKILL); first.wait()
    before = stages(folder)
    second = start("run", "--scale", "smoke", "--out", folder, PYTHONHASHSEED="7")
    output = second.communicate(timeout=1200)[0]
    assert second.returncode == 0, output
    return folder, before, output


def test_resume_redoes_nothing(killed_and_resumed):
    folder, before, output = killed_and_resumed
    assert before, "the first run was killed before its first stage ended"
    for name, record in before.items():
        assert f"{name}: already done" in output
        assert stages(folder)[name] == record


def test_result(killed_and_resumed):
    folder = killed_and_resumed[0]
    result = json.loads((folder/"result.json").read_text())
    methods = {r["method"] for r in result["rows"] if r["target"] == "desk" and r["split"] == "test"}
    assert {"base", "do_nothing", "routed", "oracle_routed"} <= methods
    assert set(result) == {"rows", "seconds", "peak_memory_bytes", "budget", "seed"}
    assert set(result["rows"][0]) >= {"method", "target", "split", "tasks", "trials", "successes", "rate", "low", "high", "mean_reward", "p_vs_base"}
    nothing = next(r for r in result["rows"] if r["method"] == "do_nothing" and r["target"] == "desk")
    assert nothing["rate"] <= .05
    html = (folder/"report.html").read_text()
    assert "<script src" not in html and "http://" not in html.replace("http://www.w3.org", "")


def test_base_agent(killed_and_resumed):
    played = read_trajectories(killed_and_resumed[0]/"trajectories"/"base_train.jsonl")
    calls, broken = sum(t.metadata["calls"] for t in played), sum(t.metadata["broken_calls"] for t in played)
    assert broken / calls < .02
    assert .2 < sum(t.success for t in played) / len(played) < .5


def test_selected_capabilities(killed_and_resumed):
    found = json.loads((killed_and_resumed[0]/"capabilities.json").read_text())["capabilities"]
    assert {c["name"] for c in found if c["selected"]} <= {"multi_step_task_completion", "precondition_verification", "structured_data_reasoning", "tool_calling_precision"}


def test_other_parameters_are_refused(killed_and_resumed):
    other = start("run", "--scale", "smoke", "--seed", 5, "--out", killed_and_resumed[0])
    assert "seed 0 instead of 5" in other.communicate()[0] and other.returncode == 2


def test_two_at_once(killed_and_resumed):
    import fcntl
    with open(killed_and_resumed[0]/".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        other = start("run", "--scale", "smoke", "--out", killed_and_resumed[0])
        assert "in use by another run" in other.communicate()[0] and other.returncode == 2


def test_same_seed_same_bytes(tmp_path):
    code = """
import sys, hashlib
from trace_nb.core.policy import load_policy
from trace_nb.core.rollout import rollout
from trace_nb.synthesize.capabilities import MultiStepRetail, PreconditionAirline
import json
played = rollout(load_policy("pocket"), [MultiStepRetail, PreconditionAirline], [5, 6], 4, seed=3)
print(hashlib.sha256(json.dumps([t.to_dict() for t in played]).encode()).hexdigest())
"""
    said = {subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "PYTHONHASHSEED": h}).stdout.split()[-1] for h in ("1", "2")}
    assert len(said) == 1


def test_a_second_round(tmp_path, monkeypatch):
    "With every adapter accepted, the routed agent is diagnosed again and heirs take the place of their parents."
    from trace_nb.pipeline import Parameters, run_loop
    from trace_nb.train import gate
    judged = gate.accept
    monkeypatch.setattr(gate, "accept", lambda *sides, **options: judged(*sides, **options) | {"accepted": True, "reason": ""})
    run_loop(tmp_path/"run", Parameters(scale="smoke"), lambda line: None, rounds=2)
    cards = {p.parent.name: json.loads(p.read_text()) for p in (tmp_path/"run"/"adapters").glob("*/capability.json")}
    heirs = [name for name in cards if name.endswith("_2")]
    assert heirs and all(cards[name]["capability"] == name.removesuffix("_2") and cards[name]["parents"] for name in heirs)
    assert all(cards[name.removesuffix("_2")]["superseded_by"] == name for name in heirs)
