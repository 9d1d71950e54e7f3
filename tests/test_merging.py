"Merging: the invariants of core-space TSV merging in fp64, what is refused, and what a stored merge does to pocket."
import copy, json, math, os, subprocess, sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from trace_nb.adapt.merging import (METHODS, compose, core_space, difference, dropped, elected, inner, isotropic, merge_adapters, merge_layer, read_adapter, side_by_side, thin_svd, trimmed, tsv_merge)
from trace_nb.core.trajectory import InputError, read_json

M, N = 48, 64


def pair(seed, r=4, m=M, n=N):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(m, r, generator=g, dtype=torch.double), torch.randn(r, n, generator=g, dtype=torch.double)

def dense(p): return p[0] @ p[1]
def merged(*pairs, **options): return dense(merge_layer(list(pairs), **options)[:2])
def distance(x, y): return float((x - y).norm() / y.norm())
def total(pairs): return sum(map(dense, pairs))
def spectrum(*ws): return torch.cat([torch.linalg.svdvals(w) for w in ws]).sort(descending=True).values


def full_space(pairs, k=None):
    "TSV merging of the dense deltas by their compact decompositions, written out on its own."
    parts = []
    for W in map(dense, pairs):
        U, S, Vt = torch.linalg.svd(W, full_matrices=False)
        n = int((S > 1e-9 * S[0]).sum()) if k is None else k
        parts.append((U[:, :n], S[:n], Vt[:n].T))
    U, S, V = torch.cat([p[0] for p in parts], 1), torch.cat([p[1] for p in parts]), torch.cat([p[2] for p in parts], 1)
    whiten = lambda X: X @ (lambda w, Q: Q @ torch.diag(torch.where(w > 1e-12 * w.max(), w.clamp(min=1e-300).rsqrt(), 0.)) @ Q.T)(*torch.linalg.eigh(X.T @ X))
    return whiten(U) @ torch.diag(S) @ whiten(V).T


PAIRS = [pair(i) for i in range(3)]


def test_thin_svd_and_inner_need_no_dense_delta():
    U, S, V = thin_svd(*PAIRS[0])
    assert distance(U @ torch.diag(S) @ V.T, dense(PAIRS[0])) < 1e-12
    assert inner(*PAIRS[:2]) == pytest.approx(float((dense(PAIRS[0]) * dense(PAIRS[1])).sum()))
    assert difference(PAIRS[0], PAIRS[1]) == pytest.approx(float((dense(PAIRS[0]) - dense(PAIRS[1])).norm()))

def test_one_adapter_comes_back():
    assert distance(merged(PAIRS[0]), dense(PAIRS[0])) < 1e-10

def test_core_space_is_lossless_and_sums():
    pairs = [pair(0, 2), pair(1, 8), (1e-6 * pair(2)[0], pair(2)[1])]
    Q_B, cores, Q_A = core_space(pairs)
    for core, p in zip(cores, pairs): assert distance(Q_B @ core @ Q_A.T, dense(p)) < 1e-9       # the small one too
    assert distance(Q_B @ sum(cores) @ Q_A.T, total(pairs)) < 1e-10
    assert distance(merged(*pairs, method="linear"), total(pairs)) < 1e-10

@pytest.mark.parametrize("k", [1, 2, 3, None])
def test_core_equals_full_space(k):
    assert distance(merged(*PAIRS, k=k), full_space(PAIRS, k)) < 1e-9

@pytest.mark.parametrize("ranks, rank", [((2, 8, 4), 14), ((24, 24, 24, 24), 64)])
def test_mixed_ranks_and_more_directions_than_columns(ranks, rank):
    pairs = [pair(i, r, m=80) for i, r in enumerate(ranks)]
    B, A, energy = merge_layer(pairs)
    assert (len(A), round(energy, 12)) == (rank, 1)
    assert distance(B @ A, full_space(pairs)) < 1e-9

def test_orthogonal_adapters_add_up():
    U, V = (torch.linalg.qr(torch.randn(n, 12, generator=torch.Generator().manual_seed(n), dtype=torch.double)).Q for n in (M, N))
    pairs = [(U[:, i:i + 4] * torch.tensor([3., 2, 1, .5]).double(), V[:, i:i + 4].T) for i in (0, 4, 8)]
    assert distance(merged(*pairs), total(pairs)) < 1e-10

@pytest.mark.parametrize("copies", [2, 3, 5])
def test_identical_adapters_are_that_adapter(copies):
    assert distance(merged(*[PAIRS[0]] * copies), dense(PAIRS[0])) < 1e-9

def test_identical_up_to_single_precision():
    rounded = (PAIRS[0][0].float().double(), PAIRS[0][1].float().double())
    assert distance(merged(PAIRS[0], rounded), dense(PAIRS[0])) < 1e-6

def test_naive_polar_fails_where_ours_does_not():
    "The textbook factor lets null directions vote: the reason for the minimum-norm one."
    def naive(pairs):
        parts = [torch.linalg.svd(dense(p), full_matrices=False) for p in pairs]
        factor = lambda X: (lambda P, D, Q: P @ Q)(*torch.linalg.svd(X, full_matrices=False))
        U, V = factor(torch.cat([U[:, :4] for U, _, _ in parts], 1)), factor(torch.cat([V[:4].T for _, _, V in parts], 1))
        return U @ torch.diag(torch.cat([S[:4] for _, S, _ in parts])) @ V.T
    untrained = (torch.zeros(M, 4, dtype=torch.double), PAIRS[1][1])
    assert distance(naive(PAIRS), merged(*PAIRS)) < 1e-9                   # no null direction: the same thing
    assert distance(naive([PAIRS[0]] * 3), dense(PAIRS[0])) > 1
    assert distance(naive([PAIRS[0], untrained]), dense(PAIRS[0])) > .1
    assert distance(naive([PAIRS[0], PAIRS[0], PAIRS[1]]), merged(PAIRS[0], PAIRS[0], PAIRS[1])) > .5

def test_an_untrained_adapter_changes_nothing():
    assert distance(merged(PAIRS[0], (torch.zeros(M, 4, dtype=torch.double), PAIRS[1][1])), dense(PAIRS[0])) < 1e-9
    assert float(merged((torch.zeros(M, 4, dtype=torch.double), PAIRS[1][1])).norm()) == 0

def test_gauge_order_and_scale():
    result, g = merged(*PAIRS), torch.Generator().manual_seed(9)
    G = torch.randn(4, 4, generator=g, dtype=torch.double)
    regauged = [(B @ G, torch.linalg.solve(G, A)) for B, A in PAIRS]
    assert distance(merged(*regauged), result) < 1e-9
    assert distance(merged(*PAIRS[::-1]), result) < 1e-9
    assert distance(merged(*[(7 * B, A) for B, A in PAIRS]), 7 * result) < 1e-9
    assert distance(merged(*PAIRS, alpha=-.5), -.5 * result) < 1e-9

def test_singular_values_are_the_union():
    assert distance(spectrum(merged(*PAIRS))[:12], spectrum(*map(dense, PAIRS)).sort(descending=True).values[:12]) < 1e-9

def test_isotropise_then_truncate_is_ill_posed():
    "Equal singular values have no first r: exactly 1 / T of the energy is kept, and noise decides which."
    _, cores, _ = core_space(PAIRS)
    L, R, energy = merge_layer(PAIRS, "core_tsv_truncated")
    assert energy == pytest.approx(1 / 3) and len(R) == 4
    g = torch.Generator().manual_seed(1)
    noisy = [(B * (1 + 1e-12 * torch.randn(B.shape, generator=g, dtype=torch.double)), A) for B, A in PAIRS]
    assert distance(merged(*noisy), merged(*PAIRS)) < 1e-9
    assert distance(merged(*noisy, method="core_tsv_truncated"), L @ R) > .5
    assert torch.allclose(torch.linalg.svdvals(isotropic(tsv_merge(cores))), torch.linalg.svdvals(tsv_merge(cores)).mean().expand(12))

def test_a_rank_limit_truncates_without_isotropising():
    B, A, energy = merge_layer(PAIRS, rank=4)
    S = spectrum(merged(*PAIRS))
    assert len(A) == 4 and energy == pytest.approx(float(S[:4].square().sum() / S.square().sum()))

def test_a_shared_first_A_shows_in_the_condition(adapters, tmp_path):
    "Adapters of one seed start from one A: the stack is nearly singular and the merge says so."
    first = adapters["one"]
    tensors = load_file(first/"adapter_model.safetensors")
    g = torch.Generator().manual_seed(0)
    near = {k: v + 1e-3 * torch.randn(v.shape, generator=g) if "lora_A" in k else torch.randn(v.shape, generator=g) * v.std() for k, v in tensors.items()}
    report = merge_adapters([first, edited(first, tmp_path/"near", tensors=near)], tmp_path/"out")
    assert report["condition"] > 100 and "nearly coincide" in report["note"] and report["cosine_to_sum"] < .9
    assert merge_adapters([first, first], tmp_path/"same")["condition"] is None


# entries: TIES and DARE

def test_ties_by_hand():
    row = lambda *x: torch.tensor([x], dtype=torch.double)
    a, b = row(4, -3, .1, 2), row(-1, -5, 3, .2)
    assert trimmed(a, .5).tolist() == [[4, -3, 0, 0]] and trimmed(b, .5).tolist() == [[0, -5, 3, 0]]
    assert elected([trimmed(a, .5), trimmed(b, .5)]).tolist() == [[4, -4, 3, 0]]

def test_ties_with_everything_kept_is_the_mean_of_what_agrees():
    assert distance(merged(PAIRS[0], PAIRS[0], method="ties", density=1.), dense(PAIRS[0])) < 1e-7

def test_dare_is_unbiased_seeded_and_exact_at_full_rank():
    W = dense(PAIRS[0])
    draws = torch.stack([dropped(W, .5, s) for s in range(400)])
    assert distance(draws.mean(0), W) < .1
    assert torch.equal(dropped(W, .5, 3), draws[3])
    B, A, energy = merge_layer(PAIRS, "dare_linear", rank=M, density=.5, seeds=(1, 2, 3))
    assert energy == pytest.approx(1) and distance(B @ A, sum(dropped(dense(p), .5, s) for p, s in zip(PAIRS, (1, 2, 3)))) < 1e-7
    assert .1 < merge_layer(PAIRS, "dare_linear", density=.5, seeds=(1, 2, 3))[2] < .95      # at rank 12 something is lost, and said


# folders

@pytest.fixture(scope="module")
def base():
    from trace_nb.core.policy import load_model
    return load_model("pocket")[0]

@pytest.fixture(scope="module")
def adapters(base, tmp_path_factory):
    "Three adapters of pocket with random factors: r 4, r 8, and r 4 with rsLoRA on fewer modules."
    from peft import LoraConfig, get_peft_model
    folder, found = tmp_path_factory.mktemp("adapters"), {}
    for i, (name, options) in enumerate({"one": dict(r=4, lora_alpha=4), "two": dict(r=8, lora_alpha=4), "stable": dict(r=4, lora_alpha=2, use_rslora=True, target_modules=["q_proj", "down_proj"])}.items()):
        torch.manual_seed(i)
        tuned = get_peft_model(copy.deepcopy(base), LoraConfig(**{"target_modules": ["q_proj", "v_proj", "down_proj"], "init_lora_weights": False, "task_type": "CAUSAL_LM"} | options))
        tuned.save_pretrained(str(folder/name))
        found[name] = folder/name
    return found

def edited(source, folder, tensors=None, **config):
    "A copy of an adapter with other tensors or configuration."
    folder.mkdir()
    (folder/"adapter_config.json").write_text(json.dumps(read_json(source/"adapter_config.json") | config))
    save_file({k: v.contiguous() for k, v in (tensors or load_file(source/"adapter_model.safetensors")).items()}, folder/"adapter_model.safetensors", {"format": "pt"})
    return folder


def logits(base, adapter=None, deltas=None):
    "In double precision: fp32's own rounding in pocket's forward pass is larger than that of the stored factors."
    from peft import PeftModel
    model = copy.deepcopy(base).double()
    for module, W in (deltas or {}).items(): model.get_submodule(module.removeprefix("base_model.model.")).weight.data += W
    if adapter: model = PeftModel.from_pretrained(model, str(adapter)).double()
    with torch.no_grad(): return model(torch.arange(100, 164)[None]).logits

def expected(folders, method, weights):
    "The dense deltas of a merge, from the full-space formulas."
    read, result = [read_adapter(f)[1] for f in folders], {}
    for module in set().union(*read):
        pairs = [(w * l[module][0], l[module][1]) for l, w in zip(read, weights) if module in l]
        result[module] = full_space(pairs) if method == "core_tsv" else total(pairs)
    return result

@pytest.mark.parametrize("method, weights", [("core_tsv", None), ("core_tsv", [1., .5, -2.]), ("linear", None), ("linear", [.2, .3, .5])])
def test_saved_adapter_is_base_plus_delta(base, adapters, tmp_path, method, weights):
    folders = list(adapters.values())
    report = merge_adapters(folders, tmp_path/"out", method, weights)
    wanted = logits(base, deltas=expected(folders, method, report["weights"]))
    assert float((logits(base, tmp_path/"out") - wanted).abs().max()) < 1e-5
    assert float((logits(base) - wanted).abs().max()) > .01
    assert report["stored_error"] < 1e-6 and report["rank"] <= 16

def test_live_loading_agrees_with_files(base, adapters, tmp_path):
    from peft import LoraConfig, get_peft_model, set_peft_model_state_dict
    merge_adapters(list(adapters.values()), tmp_path/"out")
    live = get_peft_model(copy.deepcopy(base), LoraConfig.from_pretrained(str(tmp_path/"out")))
    assert not set_peft_model_state_dict(live, load_file(tmp_path/"out"/"adapter_model.safetensors")).unexpected_keys
    with torch.no_grad(): found = live.double()(torch.arange(100, 164)[None]).logits
    assert torch.equal(found, logits(base, tmp_path/"out"))

@pytest.mark.parametrize("dtype, tolerance", [("float32", 1e-6), ("bfloat16", 1e-2)])
def test_stored_dtypes(adapters, tmp_path, dtype, tolerance):
    report = merge_adapters(list(adapters.values()), tmp_path/"out", dtype=dtype)
    assert 0 < report["stored_error"] < tolerance

@pytest.mark.parametrize("first", ["stable", "one"])
def test_rslora_is_read_and_never_inherited(base, adapters, tmp_path, first):
    "A merge that inherits use_rslora with alpha = r would be sqrt(r) too large."
    report = merge_adapters([adapters[first], adapters["two"]], tmp_path/"out", "linear", [1., 1.])
    config = read_json(tmp_path/"out"/"adapter_config.json")
    assert config["use_rslora"] is False and config["lora_alpha"] == config["r"] == report["rank"] and not config["rank_pattern"]
    assert report["cosine_to_sum"] == pytest.approx(1) and report["stored_error"] < 1e-6
    assert float((logits(base, tmp_path/"out") - logits(base, deltas=expected([adapters[first], adapters["two"]], "linear", [1, 1]))).abs().max()) < 1e-5

def test_the_scale_is_peft_s(base, adapters):
    "Our reading of each adapter's scale against PEFT's own."
    for folder in adapters.values():
        assert float((logits(base, folder) - logits(base, deltas={m: dense(p) for m, p in read_adapter(folder)[1].items()})).abs().max()) < 1e-5

def test_layers_that_one_adapter_lacks(adapters, tmp_path):
    merge_adapters([adapters["one"], adapters["stable"]], tmp_path/"out")
    layers, alone = read_adapter(tmp_path/"out")[1], read_adapter(adapters["one"])[1]
    values = [m for m in layers if m.endswith("v_proj")]
    assert len(layers) == 12 and len(values) == 4
    for m in values: assert difference(layers[m], alone[m]) < 1e-6 * inner(alone[m], alone[m]) ** .5
    assert read_json(tmp_path/"out"/"adapter_config.json")["target_modules"] == ["down_proj", "q_proj", "v_proj"]

def test_chosen_layers_are_named_whole(base, adapters, tmp_path):
    "With layers_to_transform a bare module name would reach layers that hold no weights."
    from peft import PeftModel
    some = {k: v for k, v in load_file(adapters["one"]/"adapter_model.safetensors").items() if ".layers.0." in k}
    part = edited(adapters["one"], tmp_path/"part", some, layers_to_transform=[0])
    merge_adapters([part, part], tmp_path/"out")
    loaded = PeftModel.from_pretrained(copy.deepcopy(base), str(tmp_path/"out"))
    assert sum("lora_A" in n for n, _ in loaded.named_parameters()) == 3

@pytest.mark.parametrize("method", list(METHODS))
def test_every_method_writes_a_report(adapters, tmp_path, method):
    folders = [str(adapters[n]) for n in ("one", "two")]
    report = merge_adapters(folders, tmp_path/"here", method, seed=5)
    assert report == read_json(tmp_path/"here"/"merge.json") and str(tmp_path) not in json.dumps(report)
    assert 0 < report["energy_kept"] <= 1 + 1e-12 and len(report["layers"]) == 12 and -1 <= report["cosine_to_sum"] <= 1 + 1e-12

def test_the_same_bytes_in_another_process(adapters, tmp_path):
    folders, methods = [str(adapters[n]) for n in ("one", "two")], ("core_tsv", "ties", "dare_linear")
    for m in methods: merge_adapters(folders, tmp_path/"here"/m, m, seed=5)
    code = f"from trace_nb.adapt.merging import merge_adapters\nfor m in {methods}: merge_adapters({folders!r}, {str(tmp_path/'there')!r} + '/' + m, m, seed=5)"
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())})
    for m in methods:
        for file in ("adapter_model.safetensors", "adapter_config.json", "merge.json"): assert (tmp_path/"here"/m/file).read_bytes() == (tmp_path/"there"/m/file).read_bytes()

def test_another_seed_draws_another_mask(adapters, tmp_path):
    for seed in (1, 2): merge_adapters([adapters["one"], adapters["two"]], tmp_path/str(seed), "dare_linear", seed=seed)
    assert (tmp_path/"1"/"adapter_model.safetensors").read_bytes() != (tmp_path/"2"/"adapter_model.safetensors").read_bytes()

def test_composition_is_the_exact_weighted_sum(adapters, tmp_path):
    folders = list(adapters.values())
    report = compose(folders, [.6, .3, .1], tmp_path/"out", p=.7)
    assert report["weights"] == pytest.approx([2 / 3, 1 / 3]) and report["adapters"] == ["one", "two"] and report["method"] == "linear"
    read, result = [read_adapter(f)[1] for f in folders], read_adapter(tmp_path/"out")[1]
    for m, p in result.items():
        wanted = side_by_side([(w * l[m][0], l[m][1]) for l, w in zip(read[:2], (2 / 3, 1 / 3))])
        assert difference(p, wanted) < 1e-6 * inner(wanted, wanted) ** .5
    with pytest.raises(InputError, match="bare base"): compose(folders, [0, 0, 0], tmp_path/"none")
    with pytest.raises(InputError, match="top-p"): compose(folders, [.5, .5, -1], tmp_path/"none", p=.5)


REFUSED = {"use_dora": True, "modules_to_save": ["lm_head"], "bias": "lora_only", "lora_bias": True, "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"q_proj": 2}, "target_parameters": ["experts.w"],
           "trainable_token_indices": [1], "alora_invocation_tokens": [1], "init_lora_weights": "pissa", "peft_type": "IA3", "a_later_option": True, "r": "four", "lora_alpha": math.inf}

@pytest.mark.parametrize("field", REFUSED)
def test_only_plain_lora_is_merged(adapters, tmp_path, field):
    bad = edited(adapters["one"], tmp_path/"bad", **{field: REFUSED[field]})
    refused([adapters["two"], bad], tmp_path, "bad", "" if field == "r" else field.removeprefix("peft_type"))

def refused(folders, tmp_path, *words, **options):
    with pytest.raises(InputError) as e: merge_adapters(folders, tmp_path/"out", **options)
    assert "\n" not in str(e.value) and all(w in str(e.value) for w in words), str(e.value)
    assert not (tmp_path/"out").exists() and not list(tmp_path.glob(".out*"))

def test_faulty_folders(adapters, tmp_path):
    one, tensors = adapters["one"], load_file(adapters["one"]/"adapter_model.safetensors")
    key = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    refused([one, tmp_path/"nowhere"], tmp_path, "nowhere", "no adapter_config.json")
    refused([one, edited(one, tmp_path/"nan", tensors | {key: torch.full_like(tensors[key], math.nan)})], tmp_path, "nan", "q_proj.lora_A", "not numbers")
    refused([one, edited(one, tmp_path/"wide", tensors | {key: torch.zeros(4, 99)})], tmp_path, "wide", "x 99", "x 128")
    refused([one, edited(one, tmp_path/"tall", tensors | {key: torch.zeros(9, 128)})], tmp_path, "tall", "do not fit")
    refused([one, edited(one, tmp_path/"head", tensors | {"base_model.model.lm_head.weight": torch.zeros(2, 2)})], tmp_path, "lm_head.weight")
    refused([one, edited(one, tmp_path/"conv", tensors | {key: torch.zeros(4, 4, 3, 3)})], tmp_path, "only linear")
    refused([one, edited(one, tmp_path/"half", {k: v for k, v in tensors.items() if k != key})], tmp_path, "half", "do not fit")
    refused([one, edited(one, tmp_path/"other", base_model_name_or_path="somebody/else")], tmp_path, "'else'", "one base")
    cut = edited(one, tmp_path/"cut"); (cut/"adapter_model.safetensors").write_bytes((one/"adapter_model.safetensors").read_bytes()[:5000])
    refused([one, cut], tmp_path, "not readable", "cut short")
    (cut/"adapter_model.safetensors").unlink(); refused([one, cut], tmp_path, "no adapter_model.safetensors")
    (cut/"adapter_config.json").write_text("{"); refused([one, cut], tmp_path, "not valid JSON")

def test_bases_are_told_apart_by_the_cards_hash(adapters, tmp_path):
    copies = [edited(adapters["one"], tmp_path/n) for n in ("a", "b")]
    for folder, sha in zip(copies, ("1111", "2222")): (folder/"capability.json").write_text(json.dumps({"base": {"name": "pocket", "sha256": sha}}))
    refused(copies, tmp_path, "1111", "2222")

def test_faulty_options(adapters, tmp_path):
    both = [adapters["one"], adapters["two"]]
    refused(both, tmp_path, "unknown merge method", "core_tsv", method="average")
    refused([], tmp_path, "no adapter")
    refused(both, tmp_path, "3 weights for 2", weights=[1, 2, 3])
    refused(both, tmp_path, "finite", weights=[1, math.nan])
    for bad in ({"k": 0}, {"rank": 0}, {"density": 0.}, {"density": 1.5}, {"dtype": "int8"}): refused(both, tmp_path, *bad, **bad)

def test_nothing_is_overwritten(adapters, tmp_path):
    (tmp_path/"out").mkdir(); (tmp_path/"out"/"mine.txt").write_text("mine")
    with pytest.raises(InputError, match="exists already"): merge_adapters([adapters["one"]], tmp_path/"out")
    assert [p.name for p in tmp_path.rglob("*")] == ["out", "mine.txt"]

def test_a_fault_while_writing_leaves_nothing(adapters, tmp_path, monkeypatch):
    import trace_nb.adapt.merging as merging
    monkeypatch.setattr(merging, "write_json", lambda *a: 1 / 0)
    with pytest.raises(ZeroDivisionError): merge_adapters([adapters["one"]], tmp_path/"out")
    assert not list(tmp_path.iterdir())

def test_the_guard_notices_a_wrong_scale(adapters, tmp_path, monkeypatch):
    "Were use_rslora inherited after all, reading back would say so."
    import trace_nb.adapt.merging as merging
    plain = merging.write_json
    monkeypatch.setattr(merging, "write_json", lambda obj, path: plain(obj | {"use_rslora": True} if "use_rslora" in obj else obj, path))
    with pytest.raises(RuntimeError, match="differs"): merge_adapters([adapters["one"], adapters["two"]], tmp_path/"out")
    assert not list(tmp_path.iterdir())
