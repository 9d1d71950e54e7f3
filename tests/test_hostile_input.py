"Input that no reader expects: nested a hundred thousand deep, pipes and devices in the place of files, and terminals without letters. One line and exit code 2, never a traceback."
import json
import os
import subprocess
import sys

import pytest

from trace_nb.cli import main
from trace_nb.core.trajectory import InputError, is_shallow, iter_trajectories, read_json
from trace_nb.synthesize.generator import lint

DEEP, DEEPER_THAN_RULES = "[" * 100_000 + "]" * 100_000, "[" * 900 + "]" * 900
CODE = "import sys; from trace_nb.cli import main; sys.exit(main())"


def refused(capsys, *words):
    code, said = main(list(map(str, words))), capsys.readouterr().err
    assert code == 2 and said.startswith("trace-nb: ") and said.count("\n") == 1 and "Traceback" not in said
    return said


def talk(arguments='{"x": 1}', result="1", metadata="{}"):
    "One trajectory; texts of JSON."
    return ('{"id": "a/1/0", "task_id": "1", "success": true, "metadata": %s, "messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "", "tool_calls": '
            '[{"id": "c", "type": "function", "function": {"name": "f", "arguments": %s}}]}, {"role": "tool", "tool_call_id": "c", "name": "f", "content": %s}]}\n' % (metadata, arguments, json.dumps(result)))


@pytest.mark.parametrize("deep", [DEEP, DEEPER_THAN_RULES])
def test_deep_label_files_and_logs(tmp_path, capsys, deep):
    labels = tmp_path/"labels"; labels.mkdir()
    (labels/"run_01.json").write_text(deep)
    assert "run_01.json" in refused(capsys, "select", labels)
    (labels/"run_01.json").write_text('{"run": 1, "totals": {"total_failed": 1, "total_passed": 1}, "labels": {"a": {"lacking_failed": %s}}}' % deep)
    assert "run_01.json" in refused(capsys, "select", labels)
    for n, text in enumerate((deep, talk(metadata=deep), talk(arguments='{"x": %s}' % deep), '{"messages": %s}' % deep, '{"eval": {}, "samples": [%s]}' % deep)):
        (tmp_path/f"{n}.jsonl").write_text(text)
        assert f"{n}.jsonl" in refused(capsys, "import", tmp_path/f"{n}.jsonl", "--out", tmp_path/"out.jsonl")
        assert f"{n}.jsonl" in refused(capsys, "label", tmp_path/f"{n}.jsonl", "--out", tmp_path/"made")
        with pytest.raises(InputError, match=f"{n}.jsonl, line 1"): list(iter_trajectories(tmp_path/f"{n}.jsonl"))
    assert not (tmp_path/"out.jsonl").exists() and not (tmp_path/"made").exists()
    assert "deep.json" in refused(capsys, "generate", _written(tmp_path/"deep.json", deep), "--endpoint", "http://127.0.0.1:1/v1", "--model", "m", "--domain", "retail")


def _written(path, text): path.write_text(text, encoding="utf-8"); return path


@pytest.mark.parametrize("deep", [DEEP, DEEPER_THAN_RULES])
def test_deep_text_is_only_text(tmp_path, capsys, deep):
    "A tool may answer with anything: what cannot be read as data is kept as words."
    failed = talk(json.dumps('{"x": %s}' % deep), deep).replace("true", "false").replace("a/1/0", "a/2/0").replace('"task_id": "1"', '"task_id": "2"')
    log = _written(tmp_path/"log.jsonl", talk(json.dumps('{"x": %s}' % deep), deep) + failed)
    assert main(["import", str(log), "--out", str(tmp_path/"out.jsonl")]) == 0 and main(["label", str(tmp_path/"out.jsonl"), "--out", str(tmp_path/"labels")]) == 0
    assert deep in (tmp_path/"out.jsonl").read_text()


@pytest.mark.parametrize("source", ["x = " + "[" * 5000 + "]" * 5000, "x = " + "-" * 5000 + "1", "x = " + "+".join(["1"] * 15000), "x = a" + ".b" * 20000, "x = " + "a(" * 90 + ")" * 90 + "".join(".b()" * 5000)])
def test_deep_source(source):
    assert lint(source + "\n")[0].startswith("line 1: ")


@pytest.mark.parametrize("place", ["fifo", "/dev/full", "/dev/null", "/dev/zero"])
def test_pipes_and_devices_are_no_logs(tmp_path, capsys, place):
    if place == "fifo": place = tmp_path/"fifo"; os.mkfifo(place)
    for words in (["import", place, "--out", tmp_path/"out.jsonl"], ["label", place, "--out", tmp_path/"labels"], ["generate", place, "--endpoint", "http://127.0.0.1:1/v1", "--model", "m"]):
        assert f"{place}: a pipe or a device" in refused(capsys, *words)
    with pytest.raises(InputError, match="a pipe or a device"): read_json(place)
    with pytest.raises(InputError, match="a pipe or a device"): list(iter_trajectories(place))
    assert sorted(p.name for p in tmp_path.iterdir()) in ([], ["fifo"])


@pytest.mark.parametrize("variables", [{"PYTHONIOENCODING": "ascii"}, {"LANG": "C", "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}])
def test_a_terminal_without_letters(tmp_path, variables):
    log = _written(tmp_path/"log.jsonl", talk().replace('"content": "x"', '"content": "käse"'))
    _written(tmp_path/"odd.jsonl", '{"käse": 1}')
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONIOENCODING", "PYTHONUTF8", "LANG", "LC_ALL", "LC_CTYPE")} | variables
    for words, code in ((["import", log, "--out", "größe.jsonl"], 0), (["import", "größe.json"], 2), (["import", "odd.jsonl"], 2), (["grüßen"], 2)):
        done = subprocess.run([sys.executable, "-c", CODE, *map(str, words)], env=env, cwd=tmp_path, capture_output=True)
        said = done.stdout + done.stderr
        assert done.returncode == code and b"Traceback" not in said and b"\\" in said and said.isascii(), done
    assert "käse" in (tmp_path/"größe.jsonl").read_text(encoding="utf-8")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full on this system")
def test_a_full_terminal(tmp_path):
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", CODE, "import", _written(tmp_path/"log.jsonl", talk()), "--out", tmp_path/"out.jsonl"], stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "standard output: No space left" in done.stderr


def test_depth():
    nested = []
    for _ in range(300): nested = [nested]
    assert not is_shallow(nested) and is_shallow({"a": [1, {"b": []}]}) and is_shallow("text")
