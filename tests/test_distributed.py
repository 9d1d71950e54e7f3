"Many workers give what one gives, and a killed one costs nothing: with processes always, with Ray where it is installed."
import multiprocessing, os, signal
from importlib.util import find_spec
from pathlib import Path

import pandas as pd
import pytest

from trace_nb.core.trajectory import InputError
from trace_nb.distributed import evaluate_sharded, evaluation_shards, fan_out, play_shard
from trace_nb.evaluate.evaluate import evaluation_frame, results_table, table_rows
from trace_nb.pipeline import evaluate_policy

TRIALS = 2                       # of desk's 60 test tasks: two batches


def dies_once(job):
    "Kills its own process the first time, in the middle of the shard; then plays it."
    flag, shard = job
    if flag and not Path(flag).exists():
        Path(flag).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return play_shard(shard)


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


@pytest.mark.skipif(not find_spec("ray"), reason="ray is not installed; pip install 'trace_nb[distributed]'")
def test_two_ray_workers_one_of_them_killed(alone, tmp_path):
    shards = evaluation_shards("desk", "pocket", "test", TRIALS, 7)
    played = [t for part in fan_out(dies_once, [(tmp_path/"flag" if i == 1 else None, s) for i, s in enumerate(shards)], ray=True) for t in part]
    assert (tmp_path/"flag").exists()
    same(evaluation_frame(played, "pocket", "test", "desk"), alone)
    with pytest.raises(InputError, match="^job 1: no good$"): fan_out(fails, range(3), ray=True)
