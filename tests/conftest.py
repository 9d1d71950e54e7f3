"A tiny run folder that every test may read; each test gets its own copy."
import json

import pandas as pd
import pytest

from trace_nb.core.trajectory import Trajectory, trajectory_id, write_json, write_trajectories
from trace_nb.evaluate.evaluate import composed, evaluation_frame, oracle_choice, results_table, routing_record, table_rows

HOSTILE = "</pre></details><script>alert(1)</script><img src=https://evil.example/x onerror=alert(2)>"
SKILL = "tool_calling_precision"


def episode(method, task, trial, success):
    call = {"id": "c1", "type": "function", "function": {"name": "get_order_details", "arguments": {"order_id": HOSTILE}}}
    messages = [{"role": "system", "content": HOSTILE}, {"role": "user", "content": HOSTILE},
                {"role": "assistant", "content": HOSTILE, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "c1", "name": "get_order_details", "content": json.dumps({"note": HOSTILE})},
                {"role": "assistant", "content": "Done."}]
    return Trajectory(trajectory_id("desk:retail", task, trial), task, trial, 0, "desk:retail", method, messages,
                      reward=float(success), success=success, parts={HOSTILE: 1.0}, metadata={"method": method})


@pytest.fixture
def run(tmp_path):
    "A tiny but complete run folder."
    run = tmp_path/"tiny"
    methods = {"base": lambda i, k: i % 3 == 0, f"single:{SKILL}": lambda i, k: i % 2 == 0, "do_nothing": lambda i, k: i == 5}
    played = {m: [episode(m, f"retail_{i:02d}", k, won(i, k)) for i in range(12) for k in range(2)] for m, won in methods.items()}
    frame = pd.concat([evaluation_frame(t, m, "test") for m, t in played.items()], ignore_index=True)
    choices = {t: SKILL if t < "retail_08" else "base" for t in frame.task_id}
    frame = pd.concat([frame, composed(frame, choices, "routed"), composed(frame, oracle_choice(frame), "oracle_routed")], ignore_index=True)
    for m, trajectories in played.items(): write_trajectories(trajectories, run/"trajectories"/f"{m.replace(':', '_')}.jsonl")
    write_trajectories([episode("routed", t.task_id, t.trial, t.task_id < "retail_05") for t in played["base"]], run/"trajectories"/"routed.jsonl")
    write_json({"rows": table_rows(results_table(frame)), "seconds": {"diagnose": 12.5, "train": 130.0}, "peak_memory_bytes": 3 * 2**30,
                "budget": {"train": {"rollouts": 640, "tokens": 123456}}, "seed": 0}, run/"result.json")
    write_json({"parameters": {"model": HOSTILE, "scale": "smoke", "seed": 0}, "versions": {"torch": "2.13.0"}}, run/"manifest.json")
    frame.to_parquet(run/"evaluations.parquet")
    write_json({"capabilities": [{"name": n, "description": HOSTILE, "mean_coverage": c, "std_coverage": .02, "mean_gap": g, "std_gap": .03, "runs_passed": 9,
                                  "runs_total": 10, "selected": g > .2, "examples": []} for n, c, g in [(SKILL, .4, .35), ("$x_{", .1, .05)]],
                "thresholds": {"rho": .1, "delta": .2, "required": 8}}, run/"capabilities.json")
    adapter = run/"adapters"/SKILL
    write_json({"name": SKILL, "description": HOSTILE, "accepted": True, "reason": HOSTILE, "metrics": {"dev_gain": .2}}, adapter/"capability.json")
    lines = [{"step": s, "reward": s / 10, "success": s / 12, "informative_share": .5, "completion_length": 50, "truncated_share": 0.0, "seconds": 1.0, "rollouts": 16, "tokens": 900} for s in range(10)]
    (adapter/"training_log.jsonl").write_text("\n".join(map(json.dumps, lines)) + '\n{"step": 10, "rew')
    write_json(routing_record(HOSTILE, choices, frame[frame.method.isin(["base", f"single:{SKILL}"])],
                              letters={"accuracy": {"letters": .3, "channel": .8}, "chance": .5, "label_mass": .01, "note": HOSTILE}), run/"routing.json")
    return run
