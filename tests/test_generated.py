"What a model wrote, from the scripted author on 127.0.0.1 to an adapter: accepted, checked, trained on and judged, and never run outside the sandbox."
import shutil
import sys

import pytest

from endpoint_server import EndpointServer
from test_generator import RIGHT, needs_sandbox
from trace_nb import pipeline
from trace_nb.adapt.library import environment_hash
from trace_nb.cli import main
from trace_nb.core.trajectory import InputError, data_folder, read_json, write_json
from trace_nb.synthesize import capabilities, generator, sandbox, sanity
from trace_nb.synthesize.generator import generate, generated, generated_file
from trace_nb.train.tasks import adapter_name, environments_of

needs_pocket = pytest.mark.skipif(not (data_folder()/"pocket"/"config.json").exists(), reason="data/pocket has no weights: run `make pocket`")
TELLTALE = "_the_code_of_a_model_ran_here"
ONE = """        return f"I would like order {orders[0]['order_id']} dropped, since it is no longer needed. Account {user['email']}.\""""     # as easy as pocket needs it
MADE = "\n".join(ONE if "return f" in line else line for line in RIGHT.replace("rng.choice([1, 2, 3])", "0").splitlines()).replace("class CancelWhatCanBe", f'{TELLTALE} = "somewhere"\n\nclass CancelWhatCanBe') + "\n"


def winnable(cls, policy=None): return {"checks": [sanity.run_check("oracle_max", lambda: sanity.oracle_max(cls, range(6)))]}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    "The folder of an environment that was asked for, refused once and then accepted."
    folder = tmp_path_factory.mktemp("made")
    write_json({"name": "refusing", "description": "Refuse what the rules forbid."}, folder/"skill.json")
    left = [MADE.replace('("told", 0.4)', '("told", 0.3)'), MADE]
    with EndpointServer(reply=lambda body: f"```python\n{left.pop(0)}```") as server, pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPENAI_API_KEY", "none")
        said = generate(folder/"skill.json", server.url, folder/"environments", "scripted", domain="retail", check=winnable, wait=.01)
    assert "accepted at version 2" in said
    return folder/"environments"


RAN = []
sys.addaudithook(lambda event, arguments: event == "exec" and TELLTALE in getattr(arguments[0], "co_names", ()) and RAN.append(arguments))


def never_ran_here():
    "Whether this process never executed a module with the telltale name."
    return not RAN


def test_the_telltale_tells():
    exec(compile(MADE, "environment.py", "exec"), {})
    assert len(RAN) == 1 and not never_ran_here()
    RAN.clear()


@needs_sandbox
@needs_pocket
def test_from_the_author_to_a_judged_adapter(made, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sizes = ["--groups", "3", "--group-size", "6", "--steps", "2"]
    assert main(["train", str(made/"refusing.py"), *sizes]) == 0
    card = read_json(tmp_path/"adapters"/"refusing"/"capability.json")
    cls = generated(made/"refusing.py")
    assert card["environments"] == {"CancelWhatCanBe": environment_hash(cls)} and len(card["requests"]) == 24
    assert len((tmp_path/"adapters"/"refusing"/"training_log.jsonl").read_text().splitlines()) == 2

    assert main(["gate", str(made), "adapters/refusing", "--held-out", "6", "--json", "verdict.json"]) in (0, 1)
    judged = read_json(tmp_path/"adapters"/"refusing"/"capability.json")
    assert judged["accepted"] is read_json(tmp_path/"verdict.json")["rows"][0]["accepted"] and judged["environments"] == card["environments"]
    assert never_ran_here() and "trace-nb gate" in capsys.readouterr().out


@needs_sandbox
def test_check_in_the_sandbox(made, tmp_path, capsys, monkeypatch):
    checked = {}
    monkeypatch.setattr(generator, "battery", lambda cls, policy, seeds, **options: checked.update(cls=cls, **options) or {"environment": cls.__name__, "passed": True, "checks": []})
    assert main(["check", str(made), "--seed", "3", "--json", str(tmp_path/"checks.json")]) == 0
    assert issubclass(checked["cls"], sandbox.Sandboxed) and checked["seed"] == 3 and read_json(tmp_path/"checks.json")["environment"] == "CancelWhatCanBe"
    before = (made/"refusing.json").read_bytes()
    assert main(["check", str(made/"refusing.py"), "--json", str(made/"refusing.json")]) == 2
    assert "would overwrite the environment" in capsys.readouterr().err and (made/"refusing.json").read_bytes() == before


@needs_sandbox
def test_every_way_to_name_it_leads_into_the_sandbox(made, tmp_path):
    run = tmp_path/"run"; shutil.copytree(made, run/"environments")
    file = run/"environments"/"refusing.py"
    for spec in (run, run/"environments", file, file.with_suffix(".json"), f"{file}:CancelWhatCanBe"):
        (cls,) = environments_of(str(spec))
        assert issubclass(cls, sandbox.Sandboxed) and adapter_name(str(spec)) == "refusing"
    assert never_ran_here()
    hashed = environment_hash(cls)
    other = sandbox.sandboxed(MADE.replace('("looked", 0.1), ("done", 0.5)', '("looked", 0.2), ("done", 0.4)'), "CancelWhatCanBe")
    assert environment_hash(sandbox.sandboxed(MADE, "CancelWhatCanBe")) == hashed != environment_hash(other)      # the reward counts, though no opening shows it


@needs_sandbox
@pytest.mark.parametrize("spoil, words", [
    (lambda file: file.write_text(MADE + "\n"), "not the version that was accepted"),
    (lambda file: file.with_suffix(".json").write_text("{"), "not valid JSON"),
    (lambda file: write_json({"accepted": True, "attempts": []}, file.with_suffix(".json")), "not the provenance"),
    (lambda file: write_json({"accepted": False, "attempts": []}, file.with_suffix(".json")), "no accepted environment"),
    (lambda file: shutil.copytree(file.parent, file.parent/"environments") and [shutil.copy(file.parent/"environments"/f"refusing{k}", file.parent/"environments"/f"again{k}") for k in (".py", ".json")], "holds 2 accepted environments"),
])
def test_what_was_not_accepted_is_refused(made, tmp_path, capsys, spoil, words):
    folder = tmp_path/"copy"; shutil.copytree(made, folder)
    spoil(folder/"refusing.py")
    for command in (["train", str(folder)], ["check", str(folder)], ["gate", str(folder), "nowhere"]):
        assert main(command) == 2
        said = capsys.readouterr().err
        assert words in said or command[0] == "gate" and "holds no adapter" in said
        assert said.count("\n") == 1
    assert never_ran_here()


def test_no_sandbox_no_training(tmp_path, monkeypatch, capsys):
    source = MADE
    (tmp_path/"refusing.py").write_text(source)
    write_json({"capability": "refusing", "domain": "retail", "accepted": True, "class_name": "CancelWhatCanBe", "attempts": [{"source": source}]}, tmp_path/"refusing.json")
    def refuse(): raise InputError("no sandbox on this machine (landlock: absent); generated code was not run")
    monkeypatch.setattr(sandbox, "mechanism", refuse); generator._in_sandbox.cache_clear()
    for command in (["train", str(tmp_path/"refusing.py"), "--out", str(tmp_path/"out")], ["check", str(tmp_path)], ["run", "--scale", "smoke", "--environments", str(tmp_path), "--out", str(tmp_path/"run")]):
        assert main(command) == 2 and "no sandbox on this machine" in capsys.readouterr().err
    assert never_ran_here() and not (tmp_path/"out").exists() and not (tmp_path/"run").exists()


@needs_sandbox
@needs_pocket
def test_run_trains_what_is_not_built_in(made, tmp_path, monkeypatch):
    monkeypatch.setattr(capabilities, "ALL_ENVIRONMENTS", {"tool_calling_precision": capabilities.ALL_ENVIRONMENTS["tool_calling_precision"]})
    monkeypatch.setitem(pipeline.SCALES, "smoke", pipeline.Scale(1, 10, 8, 1, 3, 6, 4, 1, 1))
    lines, folder = [], tmp_path/"run"
    class Began(Exception): pass
    def stages(run, rounds, cold):
        "The stages after a diagnosis that found two capabilities, up to the gate."
        run.stage("base", lambda r: True); selected = run.stage("diagnose", lambda r: ["refusing", "tool_calling_precision", "unknown"])
        found = run.stage("synthesize", lambda r: pipeline.stage_synthesize(r, selected))
        facts = run.stage("synthesize refusing", lambda r: pipeline.stage_generated(r, "refusing"), given=run.generated["refusing"].read_text())
        trained = run.stage("train refusing", lambda r: pipeline.stage_train(r, "refusing"))
        assert list(found) == ["tool_calling_precision"] and facts["classes"] == ["CancelWhatCanBe"] and trained["steps"] == 1, trained
        pipeline.write_card(run, run.path("adapters", "refusing"), "refusing", accepted=True, description="Refuse.", name="refusing")
        raise Began
    monkeypatch.setattr(pipeline, "run_stages", stages)
    for source in (made, ""):                       # the second run finds it in its own folder
        with pytest.raises(Began): pipeline.run_loop(folder, pipeline.Parameters(scale="smoke"), lines.append, environments=str(source))
    said = "\n".join(lines)
    assert "no environment for unknown" in said and "no environment for refusing" not in said and said.count("train refusing: already done") == 1
    card = read_json(folder/"adapters"/"refusing"/"capability.json")
    assert list(card["environments"]) == ["CancelWhatCanBe"] and len(card["requests"]) == 24
    assert never_ran_here()
    assert pipeline.route_request(folder, card["requests"][0]) in ("refusing", "base")      # the router's examples are on the card


@needs_sandbox
def test_left_aside(made, tmp_path):
    lines, run = [], pipeline.Run(tmp_path/"run", pipeline.Parameters(target="phone", scale="smoke"), lambda line: lines.append(line))
    assert pipeline.adopted(run, pipeline.given_environments(str(made))) == {} and "it is for retail, the target is phone" in lines[0] and not (tmp_path/"run").exists()
    with pytest.raises(InputError, match="no accepted environment"): pipeline.given_environments(str(tmp_path))


@pytest.mark.parametrize("spec", ["{}/refusing.py", "{}/refusing.json", "{}/refusing.py:CancelWhatCanBe", "{}"])
def test_the_provenance_is_read_once(tmp_path, monkeypatch, spec):
    (tmp_path/"refusing.py").write_text(MADE)
    write_json({"capability": "refusing", "domain": "retail", "accepted": True, "class_name": "CancelWhatCanBe", "attempts": [{"source": MADE}]}, tmp_path/"refusing.json")
    reads, read = [], generator.read_json
    monkeypatch.setattr(generator, "read_json", lambda path: reads.append(path) or read(path))
    assert generator.generated_file(spec.format(tmp_path)) == tmp_path/"refusing.py" and len(reads) == 1
    with pytest.raises(InputError, match="the accepted class is CancelWhatCanBe, not Other"): generator.generated_file(f"{tmp_path}/refusing.py:Other")
    assert len(reads) == 2
