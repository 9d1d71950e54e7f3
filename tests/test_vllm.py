"Sampling through a server with vLLM's requests: adapters by name, the canary, a restart, token ids, the log-probability mismatch, GRPO runs."
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from fake_vllm import FakeVLLM
from trace_nb.cli import main
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


SETTINGS = grpo.GRPOSettings(steps=2, groups=2, group_size=4, max_new_tokens=60)


def trained(server, tokenizer, folder, settings=SETTINGS, **options):
    "Log and weights of a training whose rollouts `server` plays."
    log = grpo.train_adapter(load_model("pocket")[0], tokenizer, "multi_step_task_completion", folder, settings, sampler=server.url, **({"checkpoint_every": 0} | options))
    return log, load_file(folder/"adapter_model.safetensors")


def test_a_grpo_run_sampled_by_the_server(tokenizer, tmp_path, capfd):
    "The adapter travels when it changed and each load is checked; at the end the server, the disk and nothing but the trained adapter are as before. Two programs that agree: weights of 1."
    with FakeVLLM() as server:
        log, _ = trained(server, tokenizer, tmp_path/"adapter")
        assert not server.adapters and [p.name for p in tmp_path.iterdir()] == ["adapter"]
        assert len(server.loads) == 1 + (log[0]["informative_groups"] > 0)
    lines = capfd.readouterr().err.count("a token from the one here")
    assert lines == len(server.loads) == 2                             # one canary a load
    assert all(r["mismatch_max"] < 1e-3 and r["mismatch_ratio"] == pytest.approx(1, abs=1e-3) and not r["mismatch_truncated"] for r in log)
    spoken = [b for b in server.bodies if "prompt_logprobs" not in b]
    assert {b["model"] for b in spoken} == set(server.loads)              # never the base


def test_weights_repair_what_another_kernel_samples(tokenizer, tmp_path):
    "Perturbed log-probabilities: the weights differ from 1 and reach the loss, since a cap of 1, above which none may grow, gives another adapter."
    one = replace(SETTINGS, steps=1)
    with FakeVLLM(bias=.9) as server:
        (log, weighed), (_, held) = (trained(server, tokenizer, tmp_path/str(cap), replace(one, cap=cap)) for cap in (2., 1.))
    assert log[0]["mismatch_mean"] > 1e-3 and log[0]["mismatch_ratio"] != 1.
    assert any(not weighed[k].equal(held[k]) for k in weighed)


def test_a_server_restarted_between_and_within_steps(tokenizer, tmp_path):
    "It forgets its adapters in the middle of the first step: the run is that of a server that stayed."
    with FakeVLLM() as server: calm, weights = trained(server, tokenizer, tmp_path/"calm")
    with FakeVLLM(stop_after=12) as server: log, again = trained(server, tokenizer, tmp_path/"restarted")
    assert len(server.loads) == 3 and server.loads[0] == server.loads[1]
    assert all(weights[k].equal(again[k]) for k in weights) and [r["reward"] for r in log] == [r["reward"] for r in calm]


def test_a_server_that_goes_away_leaves_a_checkpoint(tokenizer, tmp_path):
    "Training ends in one line, and goes on with another server from the last step; with rollouts of another kind it is refused."
    with FakeVLLM() as server:
        def close(record): server.gone = True
        with pytest.raises(InputError, match="see to the server") as e: trained(server, tokenizer, tmp_path/"a", progress=close, checkpoint_every=1)
    assert "\n" not in str(e.value) and [p.name for p in (tmp_path/"a").iterdir()] == ["checkpoint.pt"]
    with pytest.raises(InputError, match="served True instead of False"): grpo.train_adapter(load_model("pocket")[0], tokenizer, "multi_step_task_completion", tmp_path/"a", SETTINGS)
    with FakeVLLM() as server: assert len(trained(server, tokenizer, tmp_path/"a")[0]) == 2


def test_the_command_takes_a_server(tokenizer, tmp_path, capsys):
    with FakeVLLM() as server: assert main(["train", "MultiStepRetail", "--steps", "1", "--groups", "2", "--group-size", "4", "--sampler", server.url, "--shared", str(tmp_path/"shared"), "--out", str(tmp_path/"adapter")]) == 0
    assert "mismatch 0.0000 nats" in capsys.readouterr().out and server.loads and [p.name for p in tmp_path.iterdir()] == ["adapter"]
    assert main(["train", "MultiStepRetail", "--sampler", "localhost", "--out", str(tmp_path/"other")]) == 2 and "--sampler is 'localhost'" in capsys.readouterr().err


def test_a_step_weighs_and_records_as_the_definition_says():
    "Two micro-batches: weights and record are those of `importance_weights` over all action tokens, to the last bit."
    step, g = SimpleNamespace(settings=SimpleNamespace(cap=2.), apart=[]), torch.Generator().manual_seed(0)
    masks = [torch.tensor([[0, 1, 1, 1], [0, 0, 1, 0]]), torch.tensor([[0, 0, 1, 1, 1]])]
    logps, sampled = ([-3 * torch.rand(m.shape[0], m.shape[1] - 1, generator=g) for m in masks] for _ in range(2))
    for m, p, q in zip(masks, logps, sampled):
        rows = [grpo.Row(1, m[i].tolist(), m[i].tolist(), 1., [0., *q[i].tolist()]) for i in range(len(m))]
        assert torch.equal(grpo.served_weights(step, rows, p, m), importance_weights(p, q, m[:, 1:])[0])
    spoken = lambda lists: torch.cat([x[m[:, 1:] > 0] for x, m in zip(lists, masks)])[None]
    assert grpo.mismatch(step.apart, 2.) == importance_weights(spoken(logps), spoken(sampled), torch.ones_like(spoken(logps)))[1]
