"Sizes that mean nothing, or that nothing could ever play, are refused in one line before a model is loaded."
import pytest
from trace_nb.cli import main
from trace_nb.core.trajectory import InputError
from trace_nb.train.grpo import GRPOSettings


@pytest.mark.parametrize("words, expected", [
    (["train", "MultiStepRetail", "--groups", "100000", "--group-size", "100000"], ["groups is 100000", "1 to 1,000"]),
    (["train", "MultiStepRetail", "--groups", "1000", "--group-size", "1000"], ["1,000,000 rollouts a step", "100,000"]),
    (["train", "MultiStepRetail", "--steps", "0"], ["steps is 0", "1 to 10,000"]),
    (["train", "MultiStepRetail", "--steps", "-3"], ["steps is -3", "1 to 10,000"]),
    (["train", "MultiStepRetail", "--steps", "10000", "--groups", "11"], ["110,000 tasks", "100,000"]),
    (["train", "MultiStepRetail", "--groups", "-1"], ["groups is -1"]),
    (["train", "MultiStepRetail", "--group-size", "1"], ["group-size is 1", "2 to 1,000"]),
    (["train", "MultiStepRetail", "--refill", "-1"], ["refill is -1", "0 to 100"]),
    (["train", "MultiStepRetail", "--learning-rate", "-1"], ["learning rate of -1.0"]),
    (["bench", "--episodes", "0"], ["--episodes is 0", "at least 1"]),
    (["bench", "--repetitions", "-1"], ["--repetitions -1", "at least 1"]),
    (["bench", "--episodes", "100000000"], ["--episodes is 100000000", "at most 100,000"]),
    (["probe", "--seeds", "100000000"], ["--seeds is 100000000", "at most"]),
    (["evaluate", "--policy", "do_nothing", "--trials", "100000000"], ["--trials is 100000000", "at most 10,000"]),
    (["evaluate", "--policy", "do_nothing", "--workers", "100000"], ["--workers is 100000", "at most 1,000"]),
    (["run", "--rounds", "1000000"], ["--rounds is 1000000", "at most 100"]),
    (["gate", "MultiStepRetail", "somewhere", "--held-out", "100000000"], ["--held-out is 100000000", "at most 100,000"]),
    (["scale", "--rollouts", "1280,10000000000"], ["--rollouts is 10000000000", "at most 500,000"])])
def test_absurd_sizes(tmp_path, monkeypatch, capsys, words, expected):
    monkeypatch.chdir(tmp_path)
    for place in ("trace_nb.core.policy.load_model", "trace_nb.core.policy.load_policy"):
        monkeypatch.setattr(place, lambda *_, **__: pytest.fail("a model was loaded"))
    assert main(words) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and all(e in said for e in expected), said
    assert not list(tmp_path.iterdir())


def test_the_limits_themselves_are_allowed():
    for sizes in ({"steps": 10_000, "groups": 10}, {"steps": 1, "groups": 1000, "group_size": 100}, {"steps": 1, "groups": 1, "group_size": 2, "refill": 100}): GRPOSettings(**sizes)
    with pytest.raises(InputError): GRPOSettings(steps=10_001, groups=1)


def test_no_more_distractors_are_claimed_than_there_are():
    from types import SimpleNamespace
    from trace_nb.scaling import DISTRACTORS, sweep
    facts = [f for f, _ in sweep(SimpleNamespace(found={"adapters": {"a": "A."}}), [], [1, 3, 1000], ["routed"]) if f["method"] == "routed_capabilities"]
    assert [(f["capabilities"], f["distractors"]) for f in facts] == [(1, 0), (1, 2), (1, len(DISTRACTORS))]
