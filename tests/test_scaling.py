"A sweep over a run that accepted no adapter."
import pytest
from trace_nb import scaling
from trace_nb.pipeline import SCALES, Parameters


class Found:
    "A comparison whose TRACE run is done."
    adapters = {}
    def __init__(self, folder, parameters, log): self.parameters, self.scale, self.log = parameters, SCALES[parameters.scale], log
    def begin(self): self.found = {"adapters": self.adapters}; return self
    def say(self, text, force=False): self.log(text)


@pytest.fixture
def played(monkeypatch):
    played = []
    row = lambda c, method, trajectories, rollouts=0, capabilities=0, distractors=0: {"method": method, "rollouts": rollouts, "capabilities": capabilities, "distractors": distractors, "seed": 0, "target": "desk"}
    monkeypatch.setattr(scaling, "Comparison", Found); monkeypatch.setattr(scaling, "point", row)
    monkeypatch.setattr(scaling, "_base_row", lambda c, path: scaling.append_row(path, row(c, "base", [])))
    monkeypatch.setattr(scaling, "POINTS", {m: lambda c, r, m=m: played.append((m, r)) for m in ("routed", "target_grpo", "gepa")})
    for m in ("routed", "prompted"): monkeypatch.setattr(scaling, f"{m}_among", lambda c, o, save: played.append(save))
    return played


def test_only_what_needs_an_adapter_is_left_out_and_it_is_named_first(tmp_path, played):
    said = []
    rows = scaling.scale(tmp_path, Parameters(scale="smoke"), (0, 8, 16), (1, 2), log=lambda line: said.append((line, list(played))))
    assert [(r["method"], r["rollouts"]) for r in rows] == [("base", 0), ("target_grpo", 8), ("gepa", 8), ("target_grpo", 16), ("gepa", 16)]
    (line, before), = said
    assert before == [] and line == "not measured, no adapter was accepted: routed 8, routed 16, routed_capabilities 1, prompt_only_capabilities 1, routed_capabilities 2, prompt_only_capabilities 2"


def test_with_adapters_everything_is_measured(tmp_path, played, monkeypatch):
    monkeypatch.setattr(Found, "adapters", {"a": "A.", "b": "B."})
    said = []
    scaling.scale(tmp_path, Parameters(scale="smoke"), (8, 16), (1,), log=said.append)
    assert said == ["not measured, a step takes 8 rollouts for each adapter: routed 8"]        # four for each of two adapters
    assert played == [("target_grpo", 8), ("gepa", 8), ("routed", 16), ("target_grpo", 16), ("gepa", 16), "routed_among_1", "prompt_only_among_1"]
