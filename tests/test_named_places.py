"What was named on the command line and is not there is said at once, before anything is played."
import pytest
from trace_nb.cli import main


@pytest.fixture(autouse=True)
def nothing_is_played(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for place in ("trace_nb.pipeline.play_tasks", "trace_nb.core.policy.load_model"):
        monkeypatch.setattr(place, lambda *_, **__: pytest.fail("something was played"))


@pytest.mark.parametrize("words, expected", [
    (["compare", "--adp", "NOSUCH"], ["--adp NOSUCH", "no such file or folder", ".jsonl"]),
    (["compare", "--adp", "empty"], ["--adp empty", "holds no ADP file", ".jsonl"]),
    (["compare", "--awm", "NOSUCH", "--methods", "gepa"], ["--awm NOSUCH", "no such folder", "gen_verifier"]),
    (["compare", "--awm", "empty"], ["--awm empty", "gen_verifier"]),
    (["run", "--environments", "NOSUCH"], ["--environments NOSUCH", "no such folder", "trace-nb generate"]),
    (["run", "--environments", "empty"], ["--environments empty", "no accepted environment", "trace-nb generate"])])
def test_it_is_refused_in_one_line(tmp_path, capsys, words, expected):
    (tmp_path/"empty").mkdir()
    assert main([*words, "--scale", "smoke", "--out", "out"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and all(e in said for e in expected), said
    assert not (tmp_path/"out").exists(), "something was written"


@pytest.mark.parametrize("command", ["check", "train"])
def test_the_hint_names_every_environment(capsys, command):
    from trace_nb.synthesize.capabilities import ALL_ENVIRONMENTS
    names = [c.__name__ for classes in ALL_ENVIRONMENTS.values() for c in classes]
    assert main([command, "nosuch.py:Nope"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and len(names) == 10 and all(n in said for n in names), said
