"""Training end to end in small: every environment under plain TRL, and one step of our own trainer."""
import json, os

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import pytest

from trace_nb.core.environment import reward_func, tool_names
from trace_nb.core.policy import load_model, model_path
from trace_nb.core.trajectory import InputError
from trace_nb.synthesize.capabilities import ENVIRONMENTS
from trace_nb.train.bench import silent_seeds, with_response_template
from trace_nb.train.grpo import GRPOSettings, train_adapter
from trace_nb.train.pocket import WORLDS, Recipe, build_model, build_tokenizer, demonstrate, segments

TRAINED = [c for classes in ENVIRONMENTS.values() for c in classes]


@pytest.fixture(scope="module")
def pocket(tmp_path_factory):
    "Folder of pocket's weights; without them a tiny random model with a tokenizer of pocket's kind."
    try: return model_path("pocket")
    except InputError: pass
    import torch
    folder = tmp_path_factory.mktemp("model")
    texts = ["".join(t for t, _ in segments(demonstrate(cls, s, set()).messages, tool_names(cls))) for cls in WORLDS for s in range(5)]
    tokenizer = build_tokenizer(texts, 600)
    torch.manual_seed(0)
    build_model(Recipe(layers=2, width=64), tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def make_trainer(pocket, tmp_path_factory):
    "Makes a plain GRPOTrainer over all environments, two rollouts of one task each."
    def make(trainer_class, seeds):
        from datasets import Dataset
        from trl import GRPOConfig
        model, tokenizer = load_model(pocket)
        rows = [{"prompt": [{"role": "system", "content": cls.policy_text}, {"role": "user", "content": ""}], "environment": cls.__name__, "seed": seeds[cls]} for cls in TRAINED]
        config = GRPOConfig(output_dir=str(tmp_path_factory.mktemp("trl")), per_device_train_batch_size=2 * len(rows), num_generations=2, max_steps=1, max_completion_length=1200,
                            generation_kwargs={"max_new_tokens": 40}, max_tool_calling_iterations=8, beta=0., use_cpu=True, bf16=False, gradient_checkpointing=False,
                            report_to=[], save_strategy="no", logging_steps=1, disable_tqdm=True)
        return trainer_class(model=model, args=config, train_dataset=Dataset.from_list(rows), processing_class=with_response_template(tokenizer),
                             reward_funcs=reward_func, environment_factory={cls.__name__: cls for cls in TRAINED}), rows
    return make


def test_every_environment_trains_under_plain_trl(make_trainer):
    "One optimiser step of TRL's own trainer: all are reset, played and scored."
    from trl import GRPOTrainer
    trainer, _ = make_trainer(GRPOTrainer, dict.fromkeys(TRAINED, 3))
    trainer.train()
    log = trainer.state.log_history[0]
    assert trainer.state.global_step == 1 and 0 <= log["reward"] <= 1
    assert {type(e) for e in trainer.environments} == set(TRAINED)
    for cls in TRAINED: assert 0 <= log[f"rewards/{cls.__name__}/mean"] <= 1


def test_plain_trl_rewards_the_gold_episode(make_trainer):
    "With the oracle's words in the model's place, TRL's tool loop reads every call and every environment pays 1."
    from trl import GRPOTrainer
    seeds, gold = {cls: silent_seeds(cls, 1)[0] for cls in TRAINED}, {}
    for cls, seed in seeds.items():
        env = cls(); request = env.reset(seed=seed)
        gold[request] = [s if isinstance(s, str) else f"Next.\n<tool_call>\n{json.dumps(s)}\n</tool_call>" for s in env._oracle()]

    class Oracle(GRPOTrainer):
        def _generate_single_turn(self, prompt_ids, *args, **kwargs):
            texts = self.processing_class.batch_decode(prompt_ids)
            said = [next(steps for request, steps in gold.items() if request in t)[t.count("<|im_start|>assistant") - 1] for t in texts]
            return [self.processing_class.encode(s + "<|im_end|>", add_special_tokens=False) for s in said], None

    trainer, rows = make_trainer(Oracle, seeds)
    trainer.model.train()
    trainer._generate_and_score_completions([r for r in rows for _ in range(2)])
    assert [e.get_reward() for e in trainer.environments] == [1.] * 2 * len(TRAINED)
    assert trainer._metrics["train"]["tools/failure_frequency"] == [0.]


@pytest.mark.parametrize("capability", ENVIRONMENTS)
def test_one_step_of_our_trainer_leaves_an_adapter(pocket, tmp_path, capability):
    "PEFT files that load again, a log of one step, and no path of this machine."
    from peft import PeftModel
    if pocket != model_path_or_none(): pytest.skip("without pocket's weights nothing is learned in one step, and an adapter that changes nothing is refused")
    model, tokenizer = load_model(pocket)
    log = train_adapter(model, tokenizer, capability, tmp_path/"adapter", GRPOSettings(steps=1, groups=2, group_size=4))
    assert [json.loads(line) for line in (tmp_path/"adapter"/"training_log.jsonl").read_text().splitlines()] == log
    assert len(log) == 1 and log[0]["rollouts"] >= 8 and 0 <= log[0]["reward"] <= 1
    assert "default" in PeftModel.from_pretrained(load_model(pocket)[0], tmp_path/"adapter").peft_config
    assert str(tmp_path) not in (tmp_path/"adapter"/"adapter_config.json").read_text()


def model_path_or_none():
    try: return model_path("pocket")
    except InputError: return None


def test_a_model_that_only_babbles_is_refused(pocket, tmp_path):
    "A turn of three tokens is no answer: the pre-flight says so, and nothing is written."
    with pytest.raises(InputError, match="truncation: .* cut by a token limit"):
        train_adapter(*load_model(pocket), "MultiStepRetail", tmp_path/"adapter", GRPOSettings(steps=1, groups=1, group_size=2, max_new_tokens=3))
    assert not (tmp_path/"adapter").exists()
