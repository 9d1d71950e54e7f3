"Imitation: what is trained on, that it is what the engine says, and that the same seed gives the same adapter."
import json, os
from dataclasses import replace

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import pytest

from trace_nb.core.environment import Episode, finish, replay
from trace_nb.core.policy import ChatText, Conversation, Local, load_model, model_path
from trace_nb.core.rollout import play
from trace_nb.core.trajectory import InputError
from trace_nb.synthesize.capabilities import ENVIRONMENTS
from trace_nb.train.sft import SFTSettings, engine_row, sft_adapter, sft_rows, split_by_seed, successful

try: model_path("pocket")
except InputError as e: pytest.skip(str(e), allow_module_level=True)
CLASSES = [c for classes in ENVIRONMENTS.values() for c in classes]
MARKED = """{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{%- if m.role == 'assistant' %}{%- generation %}{{ (m.content or '') + ('!' if loop.last else '') + '<|im_end|>' }}{%- endgeneration %}
{%- else %}{{ m.content + '<|im_end|>' }}{%- endif %}{{ '\n' }}{%- endfor %}{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- endif %}"""


@pytest.fixture(scope="module")
def pocket(): return load_model("pocket")


def test_rows_are_what_the_engine_saw(pocket):
    "Re-rendered from messages, the ids and the mask are those that the policy was given and sampled."
    policy, text = Local(*pocket), ChatText(pocket[1])
    played = [Conversation(Episode(CLASSES[i % 4], 700 + i)) for i in range(16)]
    play(policy, played, 3)
    rows = [engine_row(text, finish(c.episode, str(i), 0, "pocket")) for i, c in enumerate(played) if not c.truncated]
    assert [(r["input_ids"], r["assistant_masks"]) for r in rows] == [(c.ids, c.mask) for c in played if not c.truncated]


@pytest.mark.parametrize("cls", CLASSES)
def test_trained_spans_are_the_agents_turns(pocket, cls):
    gold, tokenizer = replay(cls, 11), pocket[1]
    row = engine_row(ChatText(tokenizer), gold)
    spans, before = [], 0
    for i, m in zip(row["input_ids"], row["assistant_masks"]):
        if m: spans = spans + [[i]] if not before else spans[:-1] + [spans[-1] + [i]]
        before = m
    turns = [m for m in gold.messages if m["role"] == "assistant"]
    assert len(spans) == len(turns)
    for span, turn in zip(map(tokenizer.decode, spans), turns):
        assert span.endswith("<|im_end|>") and span.count("<|im_end|>") == 1 and span.count("<tool_call>") == len(turn.get("tool_calls") or [])
        if not turn.get("tool_calls"): assert span == turn["content"] + "<|im_end|>"


def test_a_template_that_rewrites_needs_marks(pocket):
    "What the engine cannot cut goes the template's way; SFTTrainer then masks by the marks."
    from copy import deepcopy
    tokenizer, gold = deepcopy(pocket[1]), replay(CLASSES[0], 2)
    tokenizer.chat_template = MARKED
    rows, left_out, ready = sft_rows(tokenizer, [gold], 10_000)
    assert (left_out, ready, set(rows[0])) == (0, False, {"messages", "tools"})
    out = tokenizer.apply_chat_template(gold.messages, return_dict=True, return_assistant_tokens_mask=True)
    assert tokenizer.decode([i for i, m in zip(out["input_ids"], out["assistant_masks"]) if m]).count("<|im_end|>") == sum(m["role"] == "assistant" for m in gold.messages)
    tokenizer.chat_template = MARKED.replace("{%- generation %}", "").replace("{%- endgeneration %}", "")
    with pytest.raises(InputError, match="generation"): sft_rows(tokenizer, [gold], 10_000)


def test_no_hint_and_no_failure_is_learned():
    gold = replay(CLASSES[2], 5)
    hinted = replace(gold, messages=[{"role": "system", "content": "SECRET: answer is 7"}, *gold.messages[1:]])
    kept = successful([hinted, replace(gold, task_id="6", reward=.9), replace(gold, task_id="7", termination="environment_error"), replace(gold, task_id="8", reward=None)])
    assert [t.task_id for t in kept] == ["5"] and "SECRET" not in json.dumps(kept[0].messages)
    assert split_by_seed([replace(gold, task_id=str(i)) for i in range(50)], .2, 1) == split_by_seed([replace(gold, task_id=str(i)) for i in range(50)], .2, 1)


def test_nothing_to_imitate(pocket, tmp_path):
    with pytest.raises(InputError, match="no trajectory to imitate"): sft_adapter(*pocket, "empty", tmp_path/"a", [])
    assert not (tmp_path/"a").exists()


def test_same_seed_same_adapter(tmp_path):
    gold = [replay(CLASSES[i % 4], i) for i in range(6)]
    for name in "ab": sft_adapter(*load_model("pocket"), "gold", tmp_path/name, gold, SFTSettings(epochs=1, batch=3, accumulate=1, held_out=0.))
    assert (tmp_path/"a"/"adapter_model.safetensors").read_bytes() == (tmp_path/"b"/"adapter_model.safetensors").read_bytes()
    log = [json.loads(line) for line in (tmp_path/"a"/"training_log.jsonl").read_text().splitlines()]
    assert [r["rollouts"] for r in log] == [0, 0] and log[0]["rows"] == 6 and str(tmp_path) not in (tmp_path/"a"/"adapter_config.json").read_text()
