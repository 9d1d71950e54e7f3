"The adapter library: cards and their hashes, listing what is broken, pruning without loss, saving and loading with verification."
import copy, json, math, os, subprocess, sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from trace_nb.adapt.library import (adapters_in, base_hash, environment_hash, library_command, load_from, make_card, merge, prune, read_card, save_to, similarity, verify)
from trace_nb.core.trajectory import InputError, read_json, write_json
from trace_nb.synthesize.capabilities import ENVIRONMENTS, MultiStepRetail


@pytest.fixture(scope="session")
def plain(tmp_path_factory):
    "One adapter of pocket, made once; the tests copy it with other numbers."
    from peft import LoraConfig, get_peft_model
    from trace_nb.core.policy import load_model
    folder = tmp_path_factory.mktemp("plain")/"adapter"
    get_peft_model(load_model("pocket")[0], LoraConfig(r=4, lora_alpha=4, target_modules=["q_proj"], task_type="CAUSAL_LM")).save_pretrained(str(folder))
    return folder

def adapter(plain, folder, seeds, gain=None, accepted=True, **options):
    "A copy with random factors mixed from some seeds ({seed: weight}), and its card."
    folder.mkdir(parents=True)
    config = read_json(plain/"adapter_config.json") | {"base_model_name_or_path": "pocket"}
    write_json(config, folder/"adapter_config.json")
    draw = lambda k, v: sum(w * torch.randn(v.shape, generator=torch.Generator().manual_seed(100 * s + i)) for s, w in seeds.items() for i in [hash_of(k)])
    save_file({k: draw(k, v).contiguous() for k, v in load_file(plain/"adapter_model.safetensors").items()}, folder/"adapter_model.safetensors", {"format": "pt"})
    metrics = {} if gain is None else {"held_out_base": .3, "held_out_adapter": .3 + gain}
    make_card(folder, **{"base": "pocket", "method": "grpo", "accepted": accepted, "reason": "" if accepted else "does not beat the base", "metrics": metrics} | options)
    return folder

def hash_of(text): return sum(map(ord, text)) % 97

@pytest.fixture
def library(plain, tmp_path):
    root = tmp_path/"run"/"adapters"
    adapter(plain, root/"patience", {0: 1}, .2); adapter(plain, root/"patience_again", {0: 1, 1: .05}, .1); adapter(plain, root/"precision", {2: 1}, .3)
    adapter(plain, root/"idle", {3: 1}, -.1, accepted=False)
    return root


# hashes and cards

def test_base_hash_sees_weights_and_settings_but_not_the_library_version(tmp_path):
    from trace_nb.core.trajectory import data_folder
    for n in ("config.json", "model.safetensors"): (tmp_path/n).write_bytes((data_folder()/"pocket"/n).read_bytes())
    assert base_hash(str(tmp_path)) == base_hash("pocket") != base_hash("pocket/phone")
    config = read_json(tmp_path/"config.json")
    write_json(config | {"transformers_version": "9.9"}, tmp_path/"config.json"); assert base_hash(str(tmp_path)) == base_hash("pocket")
    write_json(config | {"rms_norm_eps": .1}, tmp_path/"config.json"); assert base_hash(str(tmp_path)) != base_hash("pocket")
    write_json(config, tmp_path/"config.json")
    raw = bytearray((tmp_path/"model.safetensors").read_bytes()); raw[-5] ^= 1; (tmp_path/"model.safetensors").write_bytes(raw)
    assert base_hash(str(tmp_path)) != base_hash("pocket")

def test_a_large_file_is_sampled_to_both_ends(tmp_path):
    import hashlib
    from trace_nb.adapt.library import _add_file
    def digest(at=None):
        data = bytearray(b"x" * 10_000)
        if at is not None: data[at] = 0
        (tmp_path/"w").write_bytes(data); found = hashlib.sha256(); _add_file(found, tmp_path/"w", block=10, blocks=5); return found.hexdigest()
    assert digest() == digest() and len({digest(), digest(0), digest(9_999), digest(5_000)}) == 4

def test_a_gguf_file_is_a_base_too(plain, tmp_path):
    file = tmp_path/"tiny.gguf"; file.write_bytes(b"GGUF" + b"weights" * 99)
    before = base_hash(str(file))
    card = make_card(adapter(plain, tmp_path/"a", {0: 1}), str(file), "grpo")
    assert card["base"] == {"name": "tiny.gguf", "sha256": before} and len(before) == 16 and verify(tmp_path/"a", str(file))["base"] == card["base"]
    file.write_bytes(b"GGUF" + b"Weights" * 99); assert base_hash(str(file)) != before

def test_base_of_an_unknown_id_is_not_guessed():
    with pytest.raises(InputError, match="no local copy"): base_hash("nobody/nothing")

def test_hashes_are_the_same_in_another_process():
    code = "from trace_nb.adapt.library import *; from trace_nb.synthesize.capabilities import ENVIRONMENTS; print(base_hash('pocket'), [environment_hash(c) for cs in ENVIRONMENTS.values() for c in cs])"
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, env=os.environ | {"PYTHONHASHSEED": "7"}).stdout.strip()
    classes = [c for cs in ENVIRONMENTS.values() for c in cs]
    assert out == f"{base_hash('pocket')} {[environment_hash(c) for c in classes]}"
    assert len({environment_hash(c) for c in classes}) == len(classes)

def test_environment_hash_sees_methods_attributes_and_data():
    class Softer(MultiStepRetail):
        def get_reward(self): return 1.
    class Longer(MultiStepRetail): max_turns = 99
    class Patched(MultiStepRetail): pass
    before = environment_hash(Patched)
    Patched._parts = lambda self: {}
    class Elsewhere(MultiStepRetail):
        def reset(self, seed=0, **row): return super().reset(seed=seed + int(os.environ.get("SHIFT", 0)), **row)
    plain = environment_hash(Elsewhere); os.environ["SHIFT"] = "1"
    try: shifted = environment_hash(Elsewhere)
    finally: del os.environ["SHIFT"]
    assert len({environment_hash(MultiStepRetail), environment_hash(Softer), environment_hash(Longer)}) == 3
    assert before != environment_hash(Patched) and plain != shifted

def test_a_card_keeps_the_verdict_and_adds_the_making(plain, tmp_path):
    from trace_nb.train.grpo import GRPOSettings
    folder = adapter(plain, tmp_path/"a", {0: 1})
    (folder/"capability.json").unlink()
    write_json({"name": "multi_step", "description": "d", "accepted": True, "reason": "", "metrics": {"held_out_p": .01}}, folder/"capability.json")
    card = make_card(folder, "pocket", "grpo", [MultiStepRetail], settings=GRPOSettings(steps=3))
    assert card == read_card(folder) and (card["name"], card["accepted"], card["metrics"]) == ("multi_step", True, {"held_out_p": .01})
    assert card["environments"] == {"MultiStepRetail": environment_hash(MultiStepRetail)} and card["settings"]["steps"] == 3
    assert card["base"] == {"name": "pocket", "sha256": base_hash("pocket")} and card["versions"]["peft"]
    once = (folder/"capability.json").read_bytes()
    assert make_card(folder)["method"] == "grpo" and (folder/"capability.json").read_bytes() == once        # nothing is lost or dated

def test_no_machine_path_in_a_card(plain, tmp_path):
    folder = adapter(plain, tmp_path/"a", {0: 1}, settings={"teachers": {"x": tmp_path/"t"}, "log": str(tmp_path/"log"), "list": [tmp_path], "rate": 1e-3})
    assert str(tmp_path) not in (folder/"capability.json").read_text() and read_card(folder)["settings"] == {"teachers": {"x": "t"}, "log": "log", "list": [tmp_path.name], "rate": 1e-3}

@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"name": 3}', '{"name": "a", "metrics": []}', '{"name": "a", "base": "pocket"}'])
def test_damaged_cards(plain, tmp_path, text):
    folder = adapter(plain, tmp_path/"a", {0: 1}); (folder/"capability.json").write_text(text)
    with pytest.raises(InputError) as e: read_card(folder)
    assert "capability.json" in str(e.value) and "\n" not in str(e.value)
    assert adapters_in(tmp_path).state.tolist() == ["broken"]

def test_tampered_weights_and_foreign_bases_are_refused(library):
    folder = library/"patience"
    assert verify(folder, "pocket")["name"] == "patience"
    with pytest.raises(InputError) as e: verify(folder, "pocket/phone")
    assert base_hash("pocket") in str(e.value) and base_hash("pocket/phone") in str(e.value)
    path = folder/"adapter_model.safetensors"; raw = bytearray(path.read_bytes()); raw[-1] ^= 1; path.write_bytes(raw)
    with pytest.raises(InputError, match="not those of the card"): verify(folder)
    with pytest.raises(InputError, match="not those of the card"): merge([folder, library/"precision"], library/"m")
    assert not (library/"m").exists()


# listing

def test_listing_names_every_fault(plain, library):
    (library/".training").mkdir(); (library/".training"/"adapter_config.json").write_text("{}")
    for name in ("cut", "json", "bare", "empty_weights", "uncarded"): adapter(plain, library/name, {5: 1})
    (library/"cut"/"adapter_model.safetensors").write_bytes((library/"cut"/"adapter_model.safetensors").read_bytes()[:-100])
    (library/"json"/"adapter_config.json").write_text('{"r": 4')
    (library/"bare"/"adapter_config.json").unlink()
    (library/"empty_weights"/"adapter_model.safetensors").write_bytes(b"")
    (library/"uncarded"/"capability.json").unlink(); (library/"nothing").mkdir(); (library/"notes.txt").write_text("x")
    frame = adapters_in(library.parent).set_index("folder")              # the run folder finds its adapters
    assert frame.state.to_dict() == {".training": "broken", "bare": "broken", "cut": "broken", "empty_weights": "broken", "json": "broken", "idle": "rejected", "patience": "accepted", "patience_again": "accepted", "precision": "accepted", "uncarded": "no card"}
    for name, word in (("cut", "not readable"), ("json", "not valid JSON"), ("bare", "no such file"), ("empty_weights", "not readable"), (".training", "unfinished")): assert word in frame.reason[name], (name, frame.reason[name])
    assert not frame.reason.str.contains(str(library)).any()
    assert frame.gain["precision"] == pytest.approx(.3) and frame["rank"]["precision"] == 4
    text, rows = library_command("list", [str(library)])
    assert "5 broken" in text and json.dumps(rows, allow_nan=False)

def test_listing_nothing(tmp_path):
    assert adapters_in(tmp_path).empty and library_command("list", [str(tmp_path)])[0].startswith("no adapter")
    with pytest.raises(InputError, match="no such folder"): adapters_in(tmp_path/"nowhere")

def test_a_run_of_the_pipeline_is_listed(run):
    "The tiny run of the other tests has a card and no weights."
    assert adapters_in(run).state.tolist() == ["broken"]


# similarity and pruning

def test_similarity_is_that_of_the_dense_deltas(library):
    from trace_nb.adapt.merging import read_adapter
    names = ["patience", "patience_again", "precision"]
    flat = [torch.cat([(B @ A).flatten() for _, (B, A) in sorted(read_adapter(library/n)[1].items())]) for n in names]
    found = similarity([library/n for n in names])
    for i, a in enumerate(names):
        for j, b in enumerate(names): assert found.loc[a, b] == pytest.approx(float(flat[i] @ flat[j] / flat[i].norm() / flat[j].norm()), abs=1e-9)

def test_similarity_of_an_untrained_adapter_is_undefined(plain, library):
    silent = library/"silent"
    silent.mkdir(); (silent/"adapter_config.json").write_bytes((library/"patience"/"adapter_config.json").read_bytes())
    save_file({k: torch.zeros_like(v) for k, v in load_file(plain/"adapter_model.safetensors").items()}, silent/"adapter_model.safetensors", {"format": "pt"})
    assert math.isnan(similarity([library/"patience", silent]).iloc[0, 1])

def test_prune_moves_and_deletes_nothing(library):
    count = len(list(library.rglob("adapter_model.safetensors")))
    assert prune(library, threshold=.9) == [{"name": "idle", "reason": "rejected: does not beat the base"}, {"name": "patience_again", "reason": "cosine 1.00 with patience"}]
    assert sorted(p.name for p in library.iterdir()) == ["patience", "precision", "pruned"] and len(list(library.rglob("adapter_model.safetensors"))) == count
    assert read_json(library/"pruned"/"idle"/"pruned.json")["reason"].startswith("rejected") and prune(library, threshold=.9) == []
    from trace_nb.pipeline import accepted_adapters
    assert set(accepted_adapters(library.parent)) == {"patience", "precision"}                               # a run no longer routes to what was pruned

def test_prune_keeps_the_best(library, plain):
    assert [m["name"] for m in prune(library, keep=1)] == ["idle", "patience", "patience_again"]
    adapter(plain, library/"idle", {3: 1}, accepted=False)
    prune(library); assert sorted(p.name for p in (library/"pruned").iterdir()) == ["idle", "idle_1", "patience", "patience_again"]
    for bad in ({"keep": 0}, {"threshold": 2.}):
        with pytest.raises(InputError): prune(library, **bad)

def test_merge_writes_parents_and_waits_for_a_verdict(library):
    report = merge([library/"patience", library/"precision"], library/"both", weights=[1, .5])
    card = read_card(library/"both")
    assert card["parents"] == [{"name": n, "sha256": read_card(library/n)["weights_sha256"]} for n in ("patience", "precision")]
    assert (card["method"], card["accepted"], card["base"], card["settings"]["weights"]) == ("core_tsv", None, read_card(library/"patience")["base"], [1., .5])
    assert verify(library/"both", "pocket") and report["rank"] == 8 and not list(library.glob(".*"))


# saving and loading

def test_folder_round_trip(library, tmp_path):
    (library/"patience"/"evil.py").write_text("print(1)"); (library/"patience"/"optimizer.pt").write_bytes(b"pickle")
    assert save_to(library.parent, tmp_path/"copy") == ["idle", "patience", "patience_again", "precision"]
    assert load_from(tmp_path/"copy", tmp_path/"loaded", "pocket") == ["idle", "patience", "patience_again", "precision"]
    for file in ("adapter_model.safetensors", "adapter_config.json", "capability.json"): assert (tmp_path/"loaded"/"patience"/file).read_bytes() == (library/"patience"/file).read_bytes()
    assert not list((tmp_path/"loaded").rglob("evil.py")) and not list((tmp_path/"copy").rglob("*.pt"))
    assert load_from(library/"precision", tmp_path/"one") == ["precision"] and verify(tmp_path/"one")
    with pytest.raises(InputError, match="exists already"): load_from(library, tmp_path/"loaded")

def test_nothing_appears_when_loading_fails(library, plain, tmp_path):
    with pytest.raises(InputError, match="made for the base"): load_from(library, tmp_path/"out", "pocket/phone")
    uncarded = adapter(plain, tmp_path/"uncarded", {1: 1}); (uncarded/"capability.json").unlink()
    with pytest.raises(InputError, match="no capability.json"): load_from(uncarded, tmp_path/"out")
    (tmp_path/"empty").mkdir()
    with pytest.raises(InputError, match="no sound adapter"): load_from(tmp_path/"empty", tmp_path/"out")
    with pytest.raises(InputError, match="no such folder"): load_from(tmp_path/"nowhere", tmp_path/"out")
    assert not (tmp_path/"out").exists() and not list(tmp_path.glob(".out*"))

class Hub:
    "Stands in for Hugging Face: repositories are folders."
    def __init__(self, root): self.root, self.made = root, []
    def create_repo(self, repo, private, exist_ok): self.made.append((repo, private, exist_ok)); (self.root/repo).mkdir(parents=True, exist_ok=True)
    def upload_folder(self, repo_id, folder_path, allow_patterns, commit_message):
        import shutil
        shutil.copytree(folder_path, self.root/repo_id, dirs_exist_ok=True)
    def snapshot_download(self, repo, local_dir, allow_patterns):
        import shutil
        shutil.copytree(self.root/repo, local_dir, dirs_exist_ok=True)

def test_hub_round_trip(library, tmp_path, monkeypatch):
    import huggingface_hub
    hub = Hub(tmp_path/"hub")
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: hub); monkeypatch.setattr(huggingface_hub, "snapshot_download", hub.snapshot_download)
    assert save_to(library/"precision", "hf://me/precision") == ["precision"] and hub.made == [("me/precision", True, True)]
    assert load_from("hf://me/precision", tmp_path/"one", "pocket") == ["precision"]
    save_to(library, "hf://me/library", private=False)
    assert load_from("hf://me/library", tmp_path/"all") == ["idle", "patience", "patience_again", "precision"] and hub.made[-1] == ("me/library", False, True)
    path = tmp_path/"hub"/"me"/"precision"/"adapter_model.safetensors"; raw = bytearray(path.read_bytes()); raw[-1] ^= 1; path.write_bytes(raw)
    with pytest.raises(InputError, match="not those of the card"): load_from("hf://me/precision", tmp_path/"bad")
    assert not (tmp_path/"bad").exists()

def test_offline_is_one_line(library, tmp_path, monkeypatch):
    "The real client, told to stay offline."
    from huggingface_hub import constants
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    for act, word in ((lambda: load_from("hf://me/precision", tmp_path/"x"), "HF_HUB_OFFLINE"), (lambda: save_to(library/"precision", "hf://me/precision"), "offline"),
                      (lambda: load_from("hf://me", tmp_path/"x"), "not a repository"), (lambda: load_from("hf://a b/c d", tmp_path/"x"), "alphanumeric")):
        with pytest.raises(InputError, match=word) as e: act()
        assert "\n" not in str(e.value) and len(str(e.value)) < 400
    assert not (tmp_path/"x").exists()


# command

def test_commands(library, tmp_path):
    text, rows = library_command("similarity", [str(library)])
    assert "idle" not in text and len(rows) == 3 and rows[0] == {"a": "patience", "b": "patience_again", "cosine": pytest.approx(.99, abs=.02)}
    text, rows = library_command("merge", [str(library/"patience"), str(library/"precision")], out=str(tmp_path/"m"))
    assert "rank 8" in text and rows[0]["method"] == "core_tsv" and json.dumps(rows, allow_nan=False)
    assert library_command("save", [str(tmp_path/"m")], out=str(tmp_path/"s"))[0] == f"saved m: {tmp_path/'s'}"
    assert library_command("load", [str(tmp_path/"s")], out=str(tmp_path/"l"), base="pocket")[1] == [{"name": "m"}]
    assert "2 moved" in library_command("prune", [str(library)], threshold=.9)[0]
    for bad, word in ((("burn", ["x"]), "unknown action"), (("merge", [str(library)]), "--out"), (("list", []), "no folder"), (("list", ["a", "b"]), "one folder")):
        with pytest.raises(InputError, match=word): library_command(*bad)
