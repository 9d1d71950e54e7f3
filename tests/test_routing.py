"Routers, gates, composed adapters and turns with the built-in model, beyond what the notebooks show."
from dataclasses import replace

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model

from trace_nb.adapt.gate import fit_gate, load_gate, request_states, save_gate
from trace_nb.adapt.routing import BASE, LEARNED, ROUTERS, Router, composed_adapters, examples, make_router
from trace_nb.adapt.turns import Turns, event_rule, last_event
from trace_nb.core.environment import Episode
from trace_nb.core.policy import Conversation, Local, load_model
from trace_nb.core.rollout import play, rollout
from trace_nb.core.trajectory import InputError
from trace_nb.targets.desk import load_tasks

STEPS, CHECKS = "multi_step_task_completion", "precondition_verification"


@pytest.fixture(scope="module")
def pocket(): return load_model("pocket")


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    "Two small random adapters on disk, and a model that holds them."
    folder, (model, tokenizer) = tmp_path_factory.mktemp("adapters"), load_model("pocket")
    settings = LoraConfig(r=2, target_modules=["q_proj", "v_proj"])
    tuned = get_peft_model(model, settings, adapter_name=STEPS); tuned.add_adapter(CHECKS, settings)
    torch.manual_seed(0)
    for name, p in tuned.named_parameters():
        if "lora_" in name: p.data = torch.randn_like(p) * .1
    tuned.save_pretrained(str(folder))
    return tuned, tokenizer, {c: folder/c for c in (STEPS, CHECKS)}


def router(**options):
    asked = [(r, c) for c in (STEPS, CHECKS) for r in examples(c, 6)]
    return Router([STEPS, CHECKS, "base"], ["Do every step.", "Check before a write.", BASE], "channel", {}, 1 / 3, 0., asked=asked, **options)


@pytest.mark.parametrize("method", ROUTERS)
def test_loaded_adapters_do_not_change_a_routing(method, pocket, adapters):
    requests, own = examples(CHECKS, 3), replace(router(), method=method)
    model, tokenizer = pocket
    expected = own.scores(model, tokenizer, requests)
    assert torch.allclose(own.scores(adapters[0], tokenizer, requests), expected, atol=1e-3)


def test_what_the_pipeline_reads(pocket):
    made = make_router(*pocket, {STEPS: "Carry out every operation the user asks for before closing the conversation."}, n=4)
    assert made.method in ("letters", "channel") and set(made.accuracy) == {"letters", "channel"} and made.chance == .5 and 0 <= made.mass <= 1
    assert set(replace(made, method="letters").choose(*pocket, examples(CHECKS, 2))) <= {STEPS, "base"}
    assert make_router(*pocket, {}).choose(*pocket, ["hello"]) == ["base"]


def test_unknown_methods_and_missing_examples_are_said(pocket):
    with pytest.raises(InputError, match="unknown router 'tea leaves'"): replace(router(), method="tea leaves").choose(*pocket, ["hello"])
    for method in LEARNED:
        with pytest.raises(InputError, match="needs examples"): replace(router(), method=method, asked=[]).choose(*pocket, ["hello"])


def test_a_shortlist_makes_letters_possible_for_forty_capabilities(pocket):
    names = [f"skill_{i}" for i in range(40)]
    words = [f"Please {chr(97 + i % 26) * 5} the {chr(97 + i // 26) * 4}{chr(97 + i % 26) * 3} now." for i in range(40)]
    many = Router([*names, "base"], [*words, BASE], "letters", {}, 1 / 41, 0., asked=list(zip(words, names)))
    with pytest.raises(InputError, match="shortlist"): many.choose(*pocket, [words[0]])
    short = replace(many, shortlist=3)
    scores = short.scores(*pocket, [words[7], words[31]])
    assert (~scores.isinf()).sum(1).tolist() == [4, 4]              # three and the base
    assert not scores[0, 7].isinf() and not scores[1, 31].isinf()


def test_a_gate_is_the_same_again_and_survives_the_disk(pocket, tmp_path):
    requests = [r for c in (STEPS, CHECKS) for r in examples(c, 8)]; labels = [STEPS] * 8 + [CHECKS] * 8
    states = request_states(*pocket, requests)
    gate = fit_gate(states, labels, [STEPS, CHECKS, "base"])
    save_gate(gate, tmp_path/"gate.json"); save_gate(fit_gate(states, labels, [STEPS, CHECKS, "base"]), tmp_path/"again.json")
    assert (tmp_path/"gate.json").read_bytes() == (tmp_path/"again.json").read_bytes()
    assert (load_gate(tmp_path/"gate.json").log_probabilities(states) == gate.log_probabilities(states)).all()
    (tmp_path/"other.json").write_text("{}")
    with pytest.raises(InputError, match="not a gate"): load_gate(tmp_path/"other.json")
    with pytest.raises(InputError, match="two options"): fit_gate(states, [STEPS] * 16, [STEPS, "base"])


def test_a_composed_adapter_is_the_weighted_sum(adapters, tmp_path):
    tuned, tokenizer, folders = adapters
    names, made = composed_adapters([{STEPS: .75, CHECKS: .25}, {CHECKS: 1.}, {}, {STEPS: .75, CHECKS: .25}], folders, tmp_path)
    assert names[0] == names[3] and names[1] == CHECKS and names[2] is None and len(made) == 3
    delta = lambda model, name: (lambda m: m.scaling[name] * m.lora_B[name].weight @ m.lora_A[name].weight)(model.base_model.model.model.layers[0].self_attn.q_proj)
    summed = PeftModel.from_pretrained(load_model("pocket")[0], str(made[names[0]]), adapter_name="sum")
    assert torch.allclose(delta(summed, "sum"), .75 * delta(tuned, STEPS) + .25 * delta(tuned, CHECKS), atol=1e-5)


def test_turns_without_the_fused_decoder(adapters):
    "The plain path says the same as the fused one, greedily."
    tuned, tokenizer, _ = adapters
    task = load_tasks("desk", "test")[1]
    rule = event_rule({"opening": STEPS, "look-up": CHECKS, "write": "base"})
    said = []
    for fused in (True, False):
        local = Local(tuned, tokenizer, temperature=0, max_new_tokens=40)
        if not fused: local.decoder = None
        play(Turns(local, rule), own := [Conversation(Episode(task.environment, task.seed)) for _ in range(2)])
        said.append([c.episode.messages for c in own])
        options = {"opening": STEPS, "look-up": CHECKS, "write": "base"}
        spoken = [i for i, m in enumerate(own[0].episode.messages) if m["role"] == "assistant"]
        assert own[0].spoke == [options.get(last_event(own[0].episode.messages[:i]), "base") for i in spoken]
    assert said[0] == said[1]


def test_turns_play_through_the_engine(adapters):
    "Rollouts record the adapter that spoke last, repeat with their seed, and an unknown option is one line."
    tuned, tokenizer, _ = adapters
    tasks = load_tasks("desk", "test")[:4]
    policy = Turns(Local(tuned, tokenizer), event_rule({"look-up": CHECKS}))
    played = [rollout(policy, [t.environment for t in tasks], [t.seed for t in tasks], 2, adapters=[STEPS] * 4, seed=5) for _ in range(2)]
    assert [t.messages for t in played[0]] == [t.messages for t in played[1]]
    assert all(t.metadata["adapter"] in (STEPS, CHECKS) for t in played[0]) and policy.switches > 0
    with pytest.raises(InputError, match="no adapter 'tea'"): rollout(Turns(Local(tuned, tokenizer), event_rule({"opening": "tea"})), tasks[0].environment, [tasks[0].seed])
