"One training over two processes (gloo, loopback): the adapter of one process up to rounding, written once; a killed one goes on in one process."
import os, subprocess, sys
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import pytest
import torch
from safetensors.torch import load_file

from trace_nb.cli import main
from trace_nb.core.policy import load_model
from trace_nb.core.trajectory import read_json
from trace_nb.train.grpo import GRPOSettings, train_adapter
from trace_nb.train.tasks import capability_tasks

needs_ranks = pytest.mark.skipif(not torch.distributed.is_available() or not torch.distributed.is_gloo_available(), reason="this torch was built without torch.distributed and gloo")

SETTINGS = GRPOSettings(steps=2, groups=3, group_size=4, refill=1, evaluate_every=2, held_out=2, stream="rollout")
LIMITED = replace(SETTINGS, steps=4, budget=40, refill=2, advantage="batch", loss_mean="tokens", clip_high=.28, evaluate_every=0)
TASKS = [("MultiStepRetail", "precondition_verification"), 6]
WORKER = f"""
import os, sys
from trace_nb.core.policy import load_model
from trace_nb.train.grpo import GRPOSettings, train_adapter
from trace_nb.train.tasks import capability_tasks
die = "die" in sys.argv and (lambda record: os._exit(3))
settings = {LIMITED!r} if "limited" in sys.argv else {SETTINGS!r}
train_adapter(*load_model("pocket"), "mixed", f"{{sys.argv[1]}}/of_rank_{{os.environ['RANK']}}", settings, die or print, tasks=capability_tasks(*{TASKS!r}), checkpoint_every=1)
"""


def launch(*words, processes=2):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), *map(str, words)]
    paths = os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")]))
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""})


def apart(a, b):
    "Relative distance of the weights of two adapter folders."
    a, b = (load_file(folder/"adapter_model.safetensors") for folder in (a, b))
    assert a.keys() == b.keys()
    return float((sum((a[k] - b[k]).pow(2).sum() for k in a) / sum(a[k].pow(2).sum() for k in a)).sqrt())


@pytest.fixture(scope="module")
def worker(tmp_path_factory):
    path = tmp_path_factory.mktemp("worker")/"worker.py"
    path.write_text(WORKER)
    return path


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    "The same in this process: adapter folder and log."
    folder = tmp_path_factory.mktemp("alone")/"adapter"
    return folder, train_adapter(*load_model("pocket"), "mixed", folder, SETTINGS, tasks=capability_tasks(*TASKS), checkpoint_every=0)


@needs_ranks
def test_two_ranks_make_the_adapter_of_one(alone, worker, tmp_path):
    "Refilled groups and a look at held-out seeds included. Each rank was given a folder of its own: only rank 0 wrote one, and only it reported steps."
    done = launch(worker, tmp_path/"out")
    assert done.returncode == 0, done.stderr
    assert [p.name for p in (tmp_path/"out").iterdir()] == ["of_rank_0"]
    assert sorted(p.name for p in (tmp_path/"out"/"of_rank_0").iterdir()) == ["adapter_config.json", "adapter_model.safetensors", "training_log.jsonl"]
    folder, log = alone
    assert done.stdout.count("'step': 1") == done.stdout.count("'step': 2") == 1 and sum(r["refilled_groups"] for r in log)
    said = [eval(line) for line in done.stdout.splitlines()]
    same = lambda records: [{k: v for k, v in r.items() if k not in ("seconds", "loss")} for r in records]
    assert same(said) == same(log) and [r["loss"] for r in said] == pytest.approx([r["loss"] for r in log], abs=1e-4)
    assert 0 < apart(folder, tmp_path/"out"/"of_rank_0") < 1e-4


@needs_ranks
def test_a_budget_and_the_batchs_advantage_are_those_of_one_process(worker, tmp_path):
    "All ranks together stop at the budget, refilled rollouts counted, and rewards are scaled by the deviation of the whole batch."
    log = train_adapter(*load_model("pocket"), "mixed", tmp_path/"alone", LIMITED, tasks=capability_tasks(*TASKS), checkpoint_every=0)
    spent = sum(r["rollouts"] for r in log)
    assert LIMITED.budget - LIMITED.groups * LIMITED.group_size < spent <= LIMITED.budget and len(log) < LIMITED.steps
    done = launch(worker, tmp_path/"out", "limited")
    assert done.returncode == 0, done.stderr
    said = [eval(line) for line in done.stdout.splitlines()]
    assert [(r["rollouts"], r["reward"], r["refilled_groups"]) for r in said] == [(r["rollouts"], r["reward"], r["refilled_groups"]) for r in log]
    assert apart(tmp_path/"alone", tmp_path/"out"/"of_rank_0") < 1e-4


@needs_ranks
def test_killed_on_two_ranks_goes_on_in_one_process(alone, worker, tmp_path):
    assert launch(worker, tmp_path/"out", "die").returncode
    folder = tmp_path/"out"/"of_rank_0"
    assert [p.name for p in folder.iterdir()] == ["checkpoint.pt"]
    log = train_adapter(*load_model("pocket"), "mixed", folder, SETTINGS, tasks=capability_tasks(*TASKS))
    assert len(log) == 2 and apart(alone[0], folder) < 1e-4


@needs_ranks
def test_the_command(tmp_path):
    command = tmp_path/"command.py"
    command.write_text("import sys; from trace_nb.cli import main; sys.exit(main())")
    done = launch(command, "train", "MultiStepRetail", "--steps", 1, "--groups", 2, "--group-size", 4, "--out", tmp_path/"adapter")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("step 1 of 1") == done.stdout.count("adapter: ") == 1 and read_json(tmp_path/"adapter"/"capability.json")["method"] == "grpo"


@pytest.mark.parametrize("words, fault", [(["train", "MultiStepRetail", "--groups", "1"], "2 processes for 1 groups a step"), (["run"], "only train divides its work")])
def test_what_cannot_be_divided_is_refused(words, fault, tmp_path, monkeypatch, capsys):
    "One line, exit code 2 and no file, before the processes meet."
    for name, value in {"LOCAL_RANK": "1", "RANK": "1", "WORLD_SIZE": "2", "CUDA_VISIBLE_DEVICES": ""}.items(): monkeypatch.setenv(name, value)
    assert main([*words, "--out", str(tmp_path/"out")]) == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1 and fault in said[0] and not (tmp_path/"out").exists()
