"""GRPO beyond its notebook: resuming, refusing, refilling, and losses on real rollouts."""
import os
from dataclasses import replace
from types import SimpleNamespace

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import pytest
import torch

from trace_nb.core.policy import Local, load_model, model_path
from trace_nb.core.trajectory import InputError
from trace_nb.synthesize.capabilities import MultiStepRetail
from trace_nb.train.grpo import (FIRST_TRAINING_SEED, GRPOSettings, PRESETS, Row, distinct_rows, group_advantages, loss_divisor, padded, play_groups, step_loss, step_rows,
                                 task_schedule, token_logps, train_adapter)
from trace_nb.train.tasks import capability_tasks


@pytest.fixture(scope="module")
def pocket():
    try: model_path("pocket")
    except InputError as e: pytest.skip(str(e))
    return load_model("pocket")


SMALL = GRPOSettings(steps=3, groups=2, group_size=4, refill=1, evaluate_every=2, held_out=2)
MIXED = capability_tasks(["MultiStepRetail", "precondition_verification"], 4)
weights = lambda folder: (folder/"adapter_model.safetensors").read_bytes()
timeless = lambda log: [{k: v for k, v in r.items() if k != "seconds"} for r in log]


def test_a_killed_training_goes_on_bit_for_bit(pocket, tmp_path):
    "Stopped after step 2, with moments of the optimiser, refills and looks at held-out seeds in play; everything is charged once more from the log."
    before = {n: p.clone() for n, p in pocket[0].named_parameters()}
    whole = train_adapter(*pocket, "mixed", tmp_path/"whole", SMALL, tasks=MIXED, checkpoint_every=0)
    def stop(record):
        if record["step"] == 2: raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt): train_adapter(*pocket, "mixed", tmp_path/"killed", SMALL, stop, tasks=MIXED, checkpoint_every=1)
    assert [p.name for p in (tmp_path/"killed").iterdir()] == ["checkpoint.pt"]
    with pytest.raises(InputError, match="learning_rate 0.003 instead of 0.001"): train_adapter(*pocket, "mixed", tmp_path/"killed", replace(SMALL, learning_rate=1e-3), tasks=MIXED)
    seen = []
    resumed = train_adapter(*pocket, "mixed", tmp_path/"killed", SMALL, seen.append, tasks=MIXED)
    assert timeless(resumed) == timeless(whole) == timeless(seen) and weights(tmp_path/"killed") == weights(tmp_path/"whole")
    assert sorted(p.name for p in (tmp_path/"killed").iterdir()) == ["adapter_config.json", "adapter_model.safetensors", "training_log.jsonl"]
    assert "held_out_success" in whole[1] and whole[1]["rollouts"] == 8 + 4 * whole[1]["refilled_groups"] + 2
    assert all(p.equal(before[n]) and p.requires_grad for n, p in pocket[0].named_parameters())       # the base is as it was, unwrapped


def test_another_base_is_refused(pocket, tmp_path):
    def stop(record): raise KeyboardInterrupt
    quick = GRPOSettings(steps=2, groups=1, group_size=4)
    with pytest.raises(KeyboardInterrupt): train_adapter(*pocket, "MultiStepRetail", tmp_path, quick, stop, checkpoint_every=1)
    weight = pocket[0].model.norm.weight
    with torch.no_grad(): weight.mul_(1.5)
    try:
        with pytest.raises(InputError, match="checkpoint.pt: made with base"): train_adapter(*pocket, "MultiStepRetail", tmp_path, quick)
    finally:
        with torch.no_grad(): weight.div_(1.5)


class Generous(MultiStepRetail):
    "Pays whatever happens."
    def get_reward(self): return 1.


class Late(MultiStepRetail):
    "Pays whatever happens on the tasks of the first draw; later by how much was said."
    def reset(self, seed=0, **row): self._late = seed >= 2; self._words = 0; return super().reset(seed=seed, **row)
    def _reply(self, text): self._words += len(text); return super()._reply(text)
    def get_reward(self): return min(1., self._words / 500) if self._late else 1.


def test_preflight_refuses_after_two_draws_and_writes_nothing(pocket, tmp_path):
    steps = []
    with pytest.raises(InputError, match="rewards: no group of 4 has rewards that differ") as e:
        train_adapter(*pocket, "generous", tmp_path/"a", GRPOSettings(steps=2, groups=2, group_size=2), steps.append, tasks=[(Generous, s) for s in range(9)])
    assert not steps and not (tmp_path/"a").exists() and "\n" not in str(e.value)


def test_a_second_draw_that_teaches_is_trained_on(pocket, tmp_path):
    "A bad first draw is no refusal: the second is used, and both are charged."
    log = train_adapter(*pocket, "late", tmp_path/"a", GRPOSettings(steps=1, groups=2, group_size=4), tasks=[(Late, s) for s in range(9)])
    assert (log[0]["rollouts"], log[0]["refilled_groups"], log[0]["reward"]) == (16, 2, 1.) and log[0]["informative_groups"]


@pytest.mark.parametrize("preset", PRESETS)
def test_merged_rows_give_the_plain_gradient_on_real_rollouts(pocket, preset):
    "All rows in one batch with all logits, against distinct rows in micro-batches."
    model, tokenizer = pocket
    s = GRPOSettings(groups=2, group_size=4, microbatch=700, **PRESETS[preset])
    conversations, _ = play_groups(Local(model, tokenizer, temperature=2., max_new_tokens=40), [(MultiStepRetail, FIRST_TRAINING_SEED + i) for i in range(2)], s, 0, None)
    conversations[7] = conversations[0]                                         # at least one pair to merge
    rewards = torch.tensor([[0., 1., .3, 0.], [1., .3, 0., 0.]])                # whatever was earned: groups that differ
    advantages = group_advantages(rewards, scale=s.advantage).flatten().tolist()
    probe = model.model.layers[0].mlp.up_proj.weight
    ids, mask, weight = padded([Row(c.prompt, c.ids, c.mask, a) for c, a in zip(conversations, advantages)])
    logps, m = torch.log_softmax(model(ids).logits[:, :-1].float(), -1).gather(2, ids[:, 1:, None])[..., 0], mask[:, 1:]
    gain = logps * weight[:, None] * m
    plain, = torch.autograd.grad(-{"sequence": (gain.sum(1) / m.sum(1)).mean(), "constant": gain.sum() / (8 * s.length), "tokens": gain.sum() / m.sum()}[s.loss_mean], probe)
    rows = distinct_rows(conversations, advantages)
    assert len(rows) < 8 and plain.norm() > 1e-3
    model.zero_grad()
    step_loss(SimpleNamespace(settings=s, rows=rows, total=loss_divisor(conversations, s), accelerator=SimpleNamespace(unwrap_model=lambda m: m, backward=lambda l: l.backward())), model).backward()
    assert (probe.grad - plain).norm() <= 1e-5 * plain.norm()
    model.zero_grad()


def test_a_hint_leaves_no_trace_in_what_is_trained(pocket):
    "Rows of a step with hints begin with the plain prompts, and log-probabilities are taken under these."
    model, tokenizer = pocket
    s, hint = GRPOSettings(steps=1, groups=2, group_size=4, hint_share=.5), "Zebra: look every record up before you change it."
    policy = Local(model, tokenizer)
    trainer = SimpleNamespace(settings=s, policy=policy, schedule=task_schedule("MultiStepRetail"), hint=hint, check=None, first_step=1, spent=0, state=SimpleNamespace(global_step=0))
    seen, play = [], policy.text.first
    policy.text.first = lambda messages, tools: seen.append(messages[0]["content"]) or play(messages, tools)
    policy.begin_, policy.begin = policy.begin, lambda conversations, seed: ([setattr(c, "adapter", None) for c in conversations], policy.begin_(conversations, seed=seed))
    rows, record = step_rows(trainer, [{"task": i // 4} for i in range(8)])
    assert sum(hint in text for text in seen) == 4 and record["rollouts"] == 8
    assert rows and not any("Zebra" in tokenizer.decode(r.ids) or any(r.mask[:r.prompt]) for r in rows)
    plain = {tuple(policy.text.first([{"role": "system", "content": MultiStepRetail.policy_text}, {"role": "user", "content": MultiStepRetail().reset(seed=FIRST_TRAINING_SEED + i)}],
             policy._tools(SimpleNamespace(episode=SimpleNamespace(environment=MultiStepRetail))))) for i in range(2)}
    assert {tuple(r.ids[:r.prompt]) for r in rows} <= plain
    ids, mask, _ = padded(rows[:1])
    alone = torch.log_softmax(model(ids).logits[:, :-1], -1).gather(2, ids[:, 1:, None])[..., 0] * mask[:, 1:]
    assert torch.allclose(token_logps(model, ids, mask), alone, atol=1e-4)


class Cut:
    "Every other rollout of a group is cut by a token limit; rewards are drawn by the environment."
    text = None
    def begin(self, conversations, seed=0): pass
    def act(self, conversations):
        for i, c in enumerate(conversations): c.ids, c.mask, c.truncated = [1, i], [0, 1], i % 2 == 0
        return [{"role": "assistant", "content": ""} for _ in conversations]


class Numbered(MultiStepRetail):
    "Rewards .25, .5, .75, 0 in the order of playing."
    made = 0
    def reset(self, seed=0, **row): Numbered.made += 1; self._n = Numbered.made; return super().reset(seed=seed, **row)
    def get_reward(self): return self._n % 4 / 4


@pytest.mark.parametrize("policy, rows, reward", [("keep", 4, .375), ("mask", 2, .375), ("penalise", 4, .125)])
def test_truncation_policies(policy, rows, reward):
    "Kept with its reward, left out of the loss, or given reward 0."
    s = GRPOSettings(steps=1, groups=1, group_size=4, truncated=policy)
    trainer = SimpleNamespace(settings=s, policy=Cut(), schedule=lambda i: (Numbered, 0), hint=None, check=None, first_step=1, spent=0, state=SimpleNamespace(global_step=0))
    Numbered.made = 0
    found, record = step_rows(trainer, [{"task": 0}] * 4)
    assert (len(found), record["reward"]) == (rows, reward)
    assert policy != "mask" or all(r.ids[1] % 2 for r in found)
