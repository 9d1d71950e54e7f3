"""What a user gets wrong: one line with the remedy, exit code 2, nothing written."""
import json, lzma, subprocess, sys
from pathlib import Path
import pytest

SHARED = Path(__file__).parents[2]/"shared"/"data"


def trace_nb(*words, cwd=None):
    return subprocess.run([sys.executable, "-c", "import sys; from trace_nb.cli import main; sys.exit(main())", *map(str, words)], capture_output=True, text=True, cwd=cwd)


def refused(result, *words):
    lines = [l for l in result.stderr.splitlines() if l.strip()]
    assert result.returncode == 2, result.stderr
    assert len(lines) == 1 and lines[0].startswith("trace-nb: "), result.stderr
    for w in words: assert w in lines[0], lines[0]


def chat(n=2):
    "A tau-bench list of `n` records that say nothing much."
    return [{"task_id": i, "reward": float(i % 2), "info": {}, "traj": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}], "trial": 0} for i in range(n)]


@pytest.mark.parametrize("name, content, words", [
    ("missing.json", None, ["missing.json", "no such file"]),
    ("empty.json", b"", ["empty"]),
    ("other.json", json.dumps({"a": 1}).encode(), ["other.json"]),
    ("notes.json", b"hello there", ["notes.json"]),
    ("latin.json", "[\"é\"]".encode("latin-1"), ["UTF-8"]),
    ("cut.json.xz", lzma.compress(json.dumps(chat(200)).encode())[:-40], ["cut.json.xz"]),
])
def test_bad_logs(tmp_path, name, content, words):
    log = tmp_path/name
    if content is not None: log.write_bytes(content)
    out = tmp_path/"t.jsonl"
    out.write_text("earlier")
    refused(trace_nb("import", log, "--out", out), *words)
    assert out.read_text() == "earlier"


def test_unknown_names(tmp_path):
    refused(trace_nb("run", "--target", "moon", "--out", tmp_path/"r"), "moon", "desk")
    refused(trace_nb("run", "--model", "nobody", "--out", tmp_path/"r"), "nobody", "pocket")
    refused(trace_nb("run", "--scale", "huge", "--out", tmp_path/"r"), "huge", "quick")
    refused(trace_nb("train", "juggling", "--out", tmp_path/"a"), "juggling", "multi_step_task_completion")
    refused(trace_nb("evaluate", "--split", "dev"), "dev", "test")
    refused(trace_nb("dance"), "dance", "known")
    refused(trace_nb("report", tmp_path), "not a run folder")
    assert not (tmp_path/"r").exists()


def test_import_label_select(tmp_path):
    log = tmp_path/"log.json"; log.write_text(json.dumps(chat(20)))
    assert "20 trajectories, 10 passed" in trace_nb("import", log, "--out", tmp_path/"t.jsonl").stdout
    assert trace_nb("label", tmp_path/"t.jsonl", "--out", tmp_path/"labels").returncode == 0
    done = trace_nb("select", tmp_path/"labels", "--json", tmp_path/"table.json")
    assert done.returncode == 0 and "precondition_verification" in done.stdout
    assert len(json.loads((tmp_path/"table.json").read_text())["rows"]) == 10
    refused(trace_nb("select", tmp_path/"nowhere"), "nowhere")


def test_real_log(tmp_path):
    log = SHARED/"tau_bench_gpt4o_airline.json.xz"
    if not log.exists(): pytest.skip(f"{log} is not on this machine")
    assert "200 trajectories, 84 passed" in trace_nb("import", log, "--out", tmp_path/"t.jsonl").stdout


def test_evaluate_oracle(tmp_path):
    done = trace_nb("evaluate", "--target", "desk", "--policy", "oracle", "--json", tmp_path/"rows.json")
    rows = {r["target"]: r for r in json.loads((tmp_path/"rows.json").read_text())["rows"]}
    assert done.returncode == 0 and rows["desk"]["rate"] == 1 and rows["desk"]["tasks"] == 60 and set(rows) == {"desk", "desk:airline", "desk:retail"}
