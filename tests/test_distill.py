"Distillation: the gradient is that of the reverse KL, the log is complete, and what is refused."
import json, os

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import pytest
import torch

from trace_nb.core.policy import Local, load_model, model_path
from trace_nb.core.rollout import derived_seed
from trace_nb.core.trajectory import InputError
from trace_nb.synthesize.capabilities import PreconditionAirline, PreconditionRetail
from trace_nb.train.adapter import save_adapter, with_lora
from trace_nb.train.distill import DistillSettings, batches, compare, distill_adapter, load_teachers, measure, step_tasks, visit
from trace_nb.train.grpo import GRPOSettings

try: model_path("pocket")
except InputError as e: pytest.skip(str(e), allow_module_level=True)
CAPABILITIES = ("multi_step_task_completion", "precondition_verification")


@pytest.fixture(scope="module")
def teachers(tmp_path_factory):
    "Two adapters of noise."
    def make(name):
        folder, tuned = tmp_path_factory.mktemp("teacher"), with_lora(load_model("pocket")[0], name, GRPOSettings(rank=4))
        torch.manual_seed(derived_seed("noise", name))
        for n, p in tuned.named_parameters():
            if "lora_B" in n: p.data.normal_(std=.3)
        save_adapter(tuned, folder, [])
        return folder
    return {c: make(c) for c in CAPABILITIES}


def test_the_rows_of_a_batch_weigh_what_they_stand_for(teachers):
    "A row played twice gives the gradient of two rows; teachers and base get none."
    model, tokenizer = load_model("pocket")
    tuned = with_lora(model, "student", DistillSettings())
    load_teachers(tuned, teachers)
    policy, settings = Local(tuned, tokenizer, max_new_tokens=30), DistillSettings(gamma=.5)
    rows, _ = visit(policy, step_tasks(teachers, DistillSettings(groups=2), 0), 1)
    row = rows[0]; mine = [p for p in tuned.parameters() if p.requires_grad]
    def gradient(batch): return torch.cat([g.flatten() for g in torch.autograd.grad(compare(tuned, batch, settings)[0], mine)])
    once = [type(row)(row.capability, row.ids, row.mask, 1.)]
    assert torch.allclose(gradient(once * 2), gradient([type(row)(row.capability, row.ids, row.mask, 2.)]), rtol=1e-4, atol=1e-6) and gradient(once).abs().max() > 0
    assert {n.split(".")[-2] for n, p in tuned.named_parameters() if p.requires_grad} == {"default"}
    assert all(len({r.capability for r in b}) == 1 for b in batches(rows, 10_000)) and sum(map(len, batches(rows, 500))) == len(rows)


def test_distilled_is_closer_and_the_same_twice(teachers, tmp_path):
    "On tasks it never trained on the student is nearer to its teacher; the same seed gives the same bytes."
    worlds = dict(zip(teachers, (PreconditionRetail, PreconditionAirline)))     # two teachers of noise contradict each other in one
    tasks = {c: [(cls, s) for s in range(6)] for c, cls in worlds.items()}
    settings = DistillSettings(steps=4, groups=4, learning_rate=5e-3, max_new_tokens=30, full_vocabulary=True)
    held = [(c, cls, 100 + i) for c, cls in worlds.items() for i in range(4)]
    for name in "ab":
        model, tokenizer = load_model("pocket")
        log = distill_adapter(model, tokenizer, "student", tmp_path/name, teachers, settings, tasks=tasks)
    assert (tmp_path/"a"/"adapter_model.safetensors").read_bytes() == (tmp_path/"b"/"adapter_model.safetensors").read_bytes()
    assert [set(r["capabilities"]) for r in log] == [set(CAPABILITIES)] * 4 and sum(r["rollouts"] for r in log) == 32
    fresh, tokenizer = load_model("pocket")
    fresh = with_lora(fresh, "student", settings); load_teachers(fresh, teachers)
    rows, played = visit(Local(fresh, tokenizer, max_new_tokens=30), held, 5)
    after, before = (measure(m, rows, played, settings) for m in (_live(tmp_path/"b", teachers), fresh))
    assert all(after[c]["reverse_kl"] < before[c]["reverse_kl"] for c in teachers) and before[CAPABILITIES[0]]["drift"] < 1e-6, (after, before)


def _live(folder, teachers):
    "The saved student with its teachers beside it."
    from peft import PeftModel
    tuned = PeftModel.from_pretrained(load_model("pocket")[0], str(folder), is_trainable=True)
    load_teachers(tuned, teachers)
    return tuned


def test_refused(tmp_path):
    model, tokenizer = load_model("pocket")
    with pytest.raises(InputError, match="no teacher"): distill_adapter(model, tokenizer, "s", tmp_path/"s", {})
    with pytest.raises(InputError, match="temperature"): distill_adapter(model, tokenizer, "s", tmp_path/"s", {"a": tmp_path}, DistillSettings(temperature=.5))
    with pytest.raises(InputError, match="no adapter_config.json"): distill_adapter(model, tokenizer, "s", tmp_path/"s", {"a": tmp_path})
