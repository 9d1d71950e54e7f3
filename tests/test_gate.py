"The gate's verdict where the infrastructure failed, and what its card keeps."
from dataclasses import replace
import pytest
from trace_nb.core.trajectory import Trajectory, trajectory_id
from trace_nb.train.gate import accept, compare, halves, task_means


def played(wins, n=12, parts=None):
    return [Trajectory(trajectory_id("E", str(i), 0), str(i), 0, i, "E", "p", [], reward=float(i in wins), success=i in wins, parts=parts or {}) for i in range(n)]


def broken(trajectories, numbers, termination):
    return [replace(t, success=False, reward=0., termination=termination) if i in numbers else t for i, t in enumerate(trajectories)]


@pytest.mark.parametrize("termination", ["environment_error", "policy_error", "user_error"])
def test_faults_are_no_failures(termination):
    "A base that is as good and whose server was gone for seven tasks does not make the adapter better."
    base, adapter = broken(played(range(12)), range(7), termination), played(range(12))
    assert accept(played(range(7, 12)), adapter, [], [])["accepted"]
    found = accept(base, adapter, [], [])
    assert not found["accepted"] and found["metrics"]["held_out_tasks"] == 5 and found["metrics"]["held_out_base"] == 1. and found["metrics"]["held_out_gain"] == 0.
    assert accept(played([]), adapter, played(range(12)), base)["accepted"], "the adapter's faults on the target are not its harm"
    assert task_means(base) == {str(i): 1. for i in range(7, 12)} and compare(broken(adapter, range(12), termination), adapter) == {}


def test_a_task_keeps_its_sound_trials():
    twice = [t for k in (0, 1) for t in [replace(t, trial=k) for t in played([0], 2)]]
    assert task_means(broken(twice, [2], "policy_error")) == {"0": 1., "1": 0.}


def test_halves_without_faults():
    allowed, forbidden = played(range(12), parts={"allowed": 1.}), played([], parts={"allowed": 0.})
    assert halves(broken(allowed, range(6), "environment_error") + broken(forbidden, range(12), "policy_error")) == {"act_success": 1.}


def test_turns_are_fitted_without_faults():
    "Options are compared on the tasks that both played to a verdict."
    from trace_nb.adapt.turns import fit_event_rule
    nan = float("nan")
    gone = lambda table: [nan] * 8 + [1.] * 8 if not table else [1.] * 16
    assert fit_event_rule(gone, ["check"], events=("write",)) == ({}, [{"event": "write", "option": "check", "rate": 1., "p": 1., "taken": False}])
    better = lambda table: [nan] * 2 + [0.] * 14 if not table else [1.] * 15 + [nan]
    assert fit_event_rule(better, ["check"], events=("write",))[0] == {"write": "check"}


def test_a_look_at_a_broken_environment_says_no_rate():
    from trace_nb.core.policy import load_policy
    from trace_nb.synthesize.capabilities import MultiStepRetail
    from trace_nb.train.grpo import GRPOSettings, look, plateau

    class Odd(MultiStepRetail):
        "Breaks on every odd seed."
        def reset(self, seed=0, **row):
            if seed % 2: raise OSError("the disk is full")
            return super().reset(seed=seed, **row)

    assert look(load_policy("oracle"), [(Odd, s) for s in range(4)], GRPOSettings())["held_out_success"] == 1.
    alone = look(load_policy("oracle"), [(Odd, 1)], GRPOSettings())
    assert alone == {"rollouts": 1, "tokens": 0} and not plateau([alone] * 9, 2)


def verdict(accepted, seeds):
    return {"accepted": accepted, "reason": "" if accepted else "does not beat the base", "metrics": {"held_out_tasks": seeds}, "budget": {"rollouts": 2 * seeds, "tokens": 0}}


@pytest.mark.parametrize("before, later, stays", [(96, 8, True), (96, 95, True), (8, 8, False), (8, 96, False), (0, 1, False)])
def test_a_smaller_verdict_does_not_replace_a_larger_one(tmp_path, monkeypatch, capsys, before, later, stays):
    from trace_nb.cli import main
    from trace_nb.core.trajectory import read_json, write_json
    from trace_nb.train import gate
    (tmp_path/"adapter_config.json").write_text("{}")
    card = {"name": "MultiStepRetail", "description": "steps", "weights_sha256": "ab", **(verdict(True, before) if before else {"accepted": None, "metrics": {}})}
    write_json(card, tmp_path/"capability.json")
    full = verdict(False, later)
    full["metrics"] |= {"held_out_base": .5, "held_out_adapter": .4, "held_out_gain": -.1, "held_out_gain_interval": [-.2, 0.], "held_out_noise": .1}
    monkeypatch.setattr(gate, "gate_adapter", lambda *_, **__: full)
    monkeypatch.setattr("trace_nb.core.policy.load_policy", lambda *_: None)
    assert main(["gate", "MultiStepRetail", str(tmp_path), "--held-out", str(later)]) == 1
    said = capsys.readouterr().out.splitlines()
    assert "rejected: does not beat the base" in said
    assert read_json(tmp_path/"capability.json") == (card if stays else card | full)
    kept = [line for line in said if "earlier verdict" in line]
    assert len(kept) == stays and all(str(n) in line for line in kept for n in (before, later, "--held-out"))


def test_a_card_that_is_none_is_said_before_anything_is_played(tmp_path, capsys, monkeypatch):
    from trace_nb.cli import main
    (tmp_path/"adapter_config.json").write_text("{}"); (tmp_path/"capability.json").write_text("[]")
    monkeypatch.setattr("trace_nb.train.gate.gate_adapter", lambda *_, **__: pytest.fail("played"))
    assert main(["gate", "MultiStepRetail", str(tmp_path)]) == 2 and "capability.json" in capsys.readouterr().err


def test_a_verdict_is_not_written_over_the_card(tmp_path, capsys):
    from trace_nb.cli import main
    (tmp_path/"adapter").mkdir(); card = tmp_path/"adapter"/"capability.json"; card.write_text("{}")
    assert main(["gate", "MultiStepRetail", str(tmp_path/"adapter"), "--json", str(card)]) == 2
    assert "lies in the adapter's own folder" in capsys.readouterr().err and card.read_text() == "{}"


def test_a_broken_adapter_is_not_a_rejected_one(tmp_path, capsys):
    "Exit code 1 means rejected, 2 that it cannot be judged."
    from trace_nb.cli import main
    folder = tmp_path/"adapter"; folder.mkdir()
    (folder/"adapter_config.json").write_text('{"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}')
    (folder/"adapter_model.safetensors").write_bytes(b"\x00nothing")
    assert main(["gate", "MultiStepRetail", str(folder), "--held-out", "1"]) == 2
    error = capsys.readouterr().err
    assert "not an adapter of this base" in error and error.strip().count("\n") == 0
