"Many workers give what one gives, and a killed one costs nothing: with processes always, with Ray where it is installed."
import multiprocessing, os, signal
from importlib.util import find_spec
from pathlib import Path

import pandas as pd
import pytest

from trace_nb import distributed
from trace_nb.cli import main
from trace_nb.core.trajectory import InputError
from trace_nb.distributed import evaluate_sharded, evaluation_shards, fan_out, play_shard
from trace_nb.evaluate.evaluate import evaluation_frame, results_table, table_rows
from trace_nb.pipeline import evaluate_policy

TRIALS = 2                       # of desk's 60 test tasks: two batches


def dies_once(job):
    "Plays a shard; the first time its process is killed before it can hand over what it played."
    flag, shard = job
    played = play_shard(shard)
    if flag and not flag.exists():
        flag.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return played


def fails(job):
    if job == 1: raise InputError("job 1: no good")
    return job


@pytest.fixture(scope="module")
def alone(): return evaluate_policy("desk", "pocket", trials=TRIALS, seed=7)


def same(frame, alone):
    pd.testing.assert_frame_equal(frame, alone)
    assert str(table_rows(results_table(frame, seed=0))) == str(table_rows(results_table(alone, seed=0)))


def test_two_processes_one_of_them_killed(alone):
    "As soon as a first shard is done, every worker is killed: the rest is done by others."
    killed = []
    def kill(done, total):
        if not killed:
            for child in multiprocessing.active_children(): killed.append(child.pid); child.kill()
    same(evaluate_sharded("desk", "pocket", trials=TRIALS, seed=7, workers=2, ray=False, progress=kill), alone)
    assert len(killed) == 2


def test_a_jobs_own_fault_is_not_repeated():
    with pytest.raises(InputError, match="^job 1: no good$"): fan_out(fails, range(3), ray=False)


def test_workers_at_the_command_line_give_the_same_bytes(tmp_path, capsys):
    for words in (["--json", f"{tmp_path/'one'}"], ["--json", f"{tmp_path/'two'}", "--workers", "2"]):
        assert main(["evaluate", "--policy", "do_nothing", "--split", "all", *words]) == 0
    assert (tmp_path/"one").read_bytes() == (tmp_path/"two").read_bytes()


@pytest.mark.parametrize("words, says", [(["--workers", "0"], "at least 1 worker"), (["--workers", "2", "--policy", "http://127.0.0.1:9/v1", "--model", "m"], "leave out --workers")])
def test_workers_that_make_no_sense(words, says, capsys):
    assert main(["evaluate", *words]) == 2 and says in capsys.readouterr().err


@pytest.fixture(scope="module")
def two_ray_workers():
    if not find_spec("ray"): pytest.skip("ray is not installed; pip install 'trace_nb[distributed]'")
    ray = distributed._ray()
    distributed._start(ray, 2)
    yield
    ray.shutdown()


def test_ray_with_one_worker_killed(two_ray_workers, alone, tmp_path):
    shards = evaluation_shards("desk", "pocket", "test", TRIALS, 7)
    played = [t for part in fan_out(dies_once, [(tmp_path/"flag" if i == 1 else None, s) for i, s in enumerate(shards)], ray=True) for t in part]
    assert (tmp_path/"flag").exists()
    same(evaluation_frame(played, "pocket", "test", "desk"), alone)


def test_ray_plays_an_evaluation(two_ray_workers, alone):
    same(evaluate_sharded("desk", "pocket", trials=TRIALS, seed=7, ray=True), alone)


def test_ray_raises_what_a_job_raises(two_ray_workers):
    with pytest.raises(InputError, match="^job 1: no good$"): fan_out(fails, range(3), ray=True)
