"Sampling through a server with vLLM's requests: adapters by name, the canary, a restart, token ids, the log-probability mismatch, one GRPO step."
from types import SimpleNamespace

import pytest
import torch

from fake_vllm import FakeVLLM
from trace_nb.core.policy import Local, load_model, with_adapters
from trace_nb.core.rollout import play, rollout
from trace_nb.core.trajectory import InputError
from trace_nb.core.vllm import VLLM, importance_weights
from trace_nb.synthesize.capabilities import MultiStepRetail
from trace_nb.train import grpo
from trace_nb.train.adapter import save_adapter, with_lora

SIZE = SimpleNamespace(rank=4, alpha=8, seed=0)


@pytest.fixture(scope="session")
def adapters(tmp_path_factory):
    "Two adapter folders that say other things than the base."
    made = {}
    for n, name in enumerate(("multi_step", "other")):
        model, _ = load_model("pocket")
        tuned = with_lora(model, name, SIZE)
        torch.manual_seed(n)
        with torch.no_grad():
            for key, p in tuned.named_parameters():
                if "lora_B" in key: p.normal_(0, .02)
        made[name] = tmp_path_factory.mktemp("adapters")/name
        save_adapter(tuned, made[name], [])
    return made


@pytest.fixture(scope="session")
def tokenizer(): return load_model("pocket")[1]


def sampler(server, tokenizer, adapters=None, **options): return VLLM(server.url, tokenizer, adapters, attempts=1, **({"say": lambda line: None} | options))


def test_greedy_turns_are_those_of_the_local_adapter(adapters, tokenizer):
    "Same ids, masks and log-probabilities as `Local` with the same adapters, base and adapter mixed in one batch."
    model = with_adapters(load_model("pocket")[0], adapters)
    local, mixed = Local(model, tokenizer, temperature=0.), ["multi_step", None, "other", "multi_step"]
    with FakeVLLM() as server:
        served = sampler(server, tokenizer, adapters, model=model, temperature=0.)
        there, here = ([grpo.begin(MultiStepRetail, s, a) for s, a in enumerate(mixed)] for _ in range(2))
        play(served, there); play(local, here)
        assert sorted(n.rpartition("-")[0] for n in server.adapters) == ["multi_step", "other"]
    for a, b in zip(there, here):
        assert (a.ids, a.mask, a.prompt, a.truncated) == (b.ids, b.mask, b.prompt, b.truncated) and a.episode.messages == b.episode.messages
        assert torch.allclose(torch.tensor(a.logps), torch.tensor(b.logps), atol=1e-4)
    assert there[0].ids != there[1].ids or there[2].ids != there[1].ids


def test_same_seed_same_episodes(adapters, tokenizer):
    with FakeVLLM(bias=.4) as server:
        played = [[t.messages for t in rollout(sampler(server, tokenizer, adapters, max_new_tokens=24), MultiStepRetail, [0], adapters=["other"], seed=s)] for s in (1, 1, 2)]
    assert played[0] == played[1] != played[2]
    sent = [b for b in server.bodies if "prompt_logprobs" not in b]
    assert all(b["top_p"] == 1 and b["top_k"] == -1 and b["return_token_ids"] and b["prompt"] and isinstance(b["prompt"][0], int) for b in sent)


@pytest.mark.parametrize("local", [False, True])
def test_the_canary_finds_an_ignored_adapter(adapters, tokenizer, local):
    model = with_adapters(load_model("pocket")[0], adapters) if local else None
    with FakeVLLM(ignore=True) as server:
        with pytest.raises(InputError, match="answers as the base does"):
            rollout(sampler(server, tokenizer, adapters, model=model), MultiStepRetail, [0], adapters=["other"])
    assert all("prompt_logprobs" in b for b in server.bodies)          # nothing was sampled


def test_the_canary_finds_a_foreign_adapter(adapters, tokenizer):
    "Only a local model can tell: the wrong adapter moves the probe too."
    model = with_adapters(load_model("pocket")[0], adapters)
    with FakeVLLM(stale=True) as server:
        policy = sampler(server, tokenizer, adapters, model=model)
        with pytest.raises(InputError, match="nats a token from the adapter here"): rollout(policy, MultiStepRetail, [0, 1], adapters=["multi_step", "other"])


def test_a_restarted_server_gets_its_adapters_back(adapters, tokenizer):
    "In the middle of a batch; said once, loaded once, and the episodes are those of a server that stayed."
    def episodes(**faults):
        said = []
        with FakeVLLM(**faults) as server: return [t.messages for t in rollout(sampler(server, tokenizer, adapters, say=said.append, max_new_tokens=24), MultiStepRetail, range(3), adapters=["multi_step"] * 3, seed=5)], said, server
    calm, said, server = episodes()
    assert len(server.loads) == 1 and len(said) == 1
    again, said, server = episodes(stop_after=5)
    assert again == calm and len(server.loads) == 2 and sum("is gone, the server was restarted" in line for line in said) == 1


def test_a_server_that_cannot_load(adapters, tokenizer, tmp_path):
    play_one = lambda server, folders: rollout(sampler(server, tokenizer, folders), MultiStepRetail, [0], adapters=["other"])
    with FakeVLLM(closed=True) as server, pytest.raises(InputError, match="VLLM_ALLOW_RUNTIME_LORA_UPDATING"): play_one(server, adapters)
    with FakeVLLM() as server, pytest.raises(InputError, match="its folder must be readable"): play_one(server, {"other": tmp_path/"none"})
    with pytest.raises(InputError, match="see to the server"): sampler(SimpleNamespace(url="http://127.0.0.1:9/v1"), tokenizer)


def test_a_server_that_goes_away_is_no_failure_of_the_agent(tokenizer):
    with FakeVLLM() as server: policy = sampler(server, tokenizer)
    [t] = rollout(policy, MultiStepRetail, [0])
    assert t.termination == "policy_error" and not t.success


def test_log_probabilities_must_be_those_of_the_sampling(tokenizer):
    with FakeVLLM(raw=True) as server, pytest.raises(InputError, match="processed_logprobs"): rollout(sampler(server, tokenizer, temperature=.7, max_new_tokens=8), MultiStepRetail, [0])
    with FakeVLLM(raw=False) as server: assert rollout(sampler(server, tokenizer, temperature=.7, max_new_tokens=8), MultiStepRetail, [0])[0].termination != "policy_error"


def mismatch(server, tokenizer):
    "The record of two conversations, and the weights' mean over action tokens."
    model, _ = load_model("pocket")
    played = [grpo.begin(MultiStepRetail, s, None) for s in range(2)]
    play(sampler(server, tokenizer, max_new_tokens=24), played)
    ids, mask, _ = grpo.padded([grpo.Row(c.prompt, c.ids, c.mask, 1.) for c in played])
    sampled = torch.nn.utils.rnn.pad_sequence([torch.tensor(c.logps) for c in played], batch_first=True)[:, 1:]
    with torch.no_grad(): return importance_weights(grpo.token_logps(model, ids, mask), sampled, mask[:, 1:])


def test_the_mismatch_is_measured(tokenizer):
    with FakeVLLM() as server: weights, record = mismatch(server, tokenizer)
    assert record["mismatch_max"] < 1e-3 and torch.allclose(weights, torch.ones_like(weights), atol=1e-3)
    with FakeVLLM(bias=.4) as server: weights, record = mismatch(server, tokenizer)
    assert record["mismatch_mean"] > .01 and record["mismatch_kl"] > 1e-3 and weights.max() <= 2.


def test_a_grpo_run_sampled_by_the_server(tokenizer, tmp_path, monkeypatch):
    "Two steps: the adapter travels when it changed, old ones leave the server and the disk, the trained one is saved."
    said, shared = [], tmp_path/"shared"
    with FakeVLLM() as server:
        monkeypatch.setattr(grpo, "Local", lambda model, tokenizer, **o: sampler(server, tokenizer, model=model, folder=shared, say=said.append, **o))
        settings = grpo.GRPOSettings(steps=2, groups=2, group_size=4, max_new_tokens=30, max_length=512)
        log = grpo.train_adapter(load_model("pocket")[0], tokenizer, "multi_step_task_completion", tmp_path/"adapter", settings, check=False, checkpoint_every=0)
        assert len(log) == 2 and (tmp_path/"adapter"/"adapter_model.safetensors").exists()
        assert len(server.adapters) == 1 and [p.name for p in shared.iterdir()] == list(server.adapters)
        assert len(server.loads) == 1 + (log[0]["informative_groups"] > 0)
