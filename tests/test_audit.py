"Faults on real episodes, and the audit: a safe page, an honest sample, and verdicts that belong to their labels."
import base64, hashlib, json, re
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from conftest import HOSTILE, SKILL, episode
from trace_nb.core.trajectory import InputError, read_json, write_trajectories
from trace_nb.diagnose.audit import audit_labels, audit_report, audit_result, audit_sample, labelled_pairs, reweighted_gap, sample_pairs, write_audit
from trace_nb.diagnose.faults import attribution, fault_table, plot_faults, read_known_issues
from trace_nb.diagnose.labeling import LABELS, write_labels
from trace_nb.diagnose.logs import read_log

REAL_LOG = Path(__file__).resolve().parents[2]/"shared"/"data"/"tau_bench_gpt4o_airline.json.xz"
needs_log = pytest.mark.skipif(not REAL_LOG.exists(), reason=f"the real tau-bench log is not at {REAL_LOG}")


# --- faults

@needs_log
def test_faults_of_the_real_log():
    table = fault_table(read_log(REAL_LOG)[0])
    assert table[["party", "cause"]].dropna().value_counts().to_dict() == {("agent", "no other cause"): 88, ("task", "known bad gold"): 27, ("user", "stopped before the write"): 1}
    assert table[table.party == "user"].id.tolist() == ["tau_bench:airline/45/1"]
    assert table[table.party.isna()].success.all()


def test_every_failure_of_pocket_on_desk_is_its_own():
    from trace_nb.core.policy import load_policy
    from trace_nb.core.rollout import rollout
    from trace_nb.targets.desk import load_tasks
    tasks = load_tasks("desk", "train")[::8]
    played = rollout(load_policy("pocket"), [t.environment for t in tasks], [t.seed for t in tasks], 2, [t.task_id for t in tasks])
    assert {attribution(t).party for t in played if not t.success} == {"agent"}


def test_shipped_issues_name_files_by_their_hash():
    table = read_known_issues()
    assert {len(tasks) for tasks in table.values()} == {10, 3, 1}
    assert all(re.fullmatch("[0-9a-f]{64}", sha) for sha in table)


@pytest.mark.parametrize("content, fault", [("[]", "no files"), ('{"files": {"abc": {}}}', "is no sha256"), ('{"files": {"%s": {"tasks": {"1": {"reason": "x", "gold": 3}}}}}' % ("a" * 64), "task 1")])
def test_a_broken_table_of_issues(tmp_path, content, fault):
    (tmp_path/"issues.json").write_text(content)
    with pytest.raises(InputError, match=fault): read_known_issues(tmp_path/"issues.json")


@pytest.mark.parametrize("messages", [[], [{"role": "system", "content": "x"}], [{"role": "assistant", "content": [{"type": "text", "text": "hi"}]}, {"role": "user", "content": None}]])
def test_odd_conversations_have_a_party(messages):
    t = replace(episode("base", "1", 0, False), messages=messages, metadata={"gold": [None, {"name": 3}], "task_file": ["x"]})
    assert attribution(t).party in ("agent", "user", "infrastructure")


def test_a_log_without_failures_has_a_figure():
    assert plot_faults(fault_table([episode("base", "1", 0, True)])).get_xlabel() == "no failed trajectory"


# --- the page

class Elements(HTMLParser):
    "Every real tag and attribute of a page, which escaped text is not; radio buttons outside of labels are counted."
    def __init__(self): super().__init__(); self.tags, self.attributes, self.open_labels, self.bare = Counter(), [], 0, 0
    def handle_starttag(self, tag, attributes):
        self.tags[tag] += 1; self.attributes += attributes
        self.open_labels += tag == "label"; self.bare += tag == "input" and not self.open_labels
    def handle_endtag(self, tag): self.open_labels -= tag == "label"


def hostile_rows(trajectories):
    return [{"id": t.id, "capability": HOSTILE, "label": LABELS[n % 3], "evidence": HOSTILE, "span": [2, 3, 9]} for n, t in enumerate(trajectories)]


def test_the_page_is_safe_and_complete_in_itself(tmp_path):
    trajectories = [replace(episode("base", f"{n:03}{HOSTILE}", 0, n % 2 == 0), messages=episode("base", "x", 0, True).messages[:4]
                            + [{"role": "assistant", "content": "my key is sk-proj-0123456789abcdef, \ud83d"}]) for n in range(60)]
    write_audit(audit_sample(hostile_rows(trajectories), trajectories, n=48), trajectories, tmp_path/"audit.html", {HOSTILE: HOSTILE})
    page, found = (tmp_path/"audit.html").read_text(encoding="utf-8"), Elements()
    found.feed(page)
    assert not set(found.tags) & {"img", "link", "iframe", "object", "embed", "base", "form"} and found.tags["script"] == found.tags["title"] == 1
    assert not [name for name, _ in found.attributes if name.startswith("on") or name in ("src", "href", "style")]
    assert found.tags["section"] == found.tags["legend"] == 48 and found.tags["input"] == 144 and found.bare == 0 and ("lang", "en") in found.attributes
    assert found.tags["mark"] == 48 and "0123456789abcdef" not in page
    script = re.search(r"<script>(.*?)</script>", page, re.S)[1]
    assert base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() in page and "evil" not in script
    ids = [value for name, value in found.attributes if name == "id"]
    assert len(ids) == len(set(ids))


def test_the_page_does_not_tell_the_outcome(tmp_path):
    trajectories = [episode("base", f"{n}", 0, n % 2 == 0) for n in range(12)]
    flipped = [replace(t, success=not t.success, reward=1 - t.reward, parts={"x": .25}) for t in trajectories]
    sample = audit_sample(hostile_rows(trajectories), trajectories, n=12)
    write_audit(sample, trajectories, tmp_path/"a.html")
    write_audit(sample, flipped, tmp_path/"b.html")
    assert (tmp_path/"a.html").read_bytes() == (tmp_path/"b.html").read_bytes()


# --- the sample and what it estimates

def population(seed=0, tasks=150):
    "Pairs of one capability with labels, and the truth: labels of passed trajectories are wrong more often."
    rng = np.random.default_rng(seed)
    pairs, truth = [], {}
    for n in range(tasks):
        side = "failed" if n < 100 else "passed"
        real = rng.choice(LABELS, p=[.4, .4, .2] if side == "failed" else [.1, .7, .2])
        label = rng.choice(LABELS) if rng.random() < (.15 if side == "failed" else .4) else real
        pairs.append({"id": f"t{n:03}", "capability": SKILL, "side": side, "label": str(label), "agreement": 1. if n % 4 else .6, "evidence": "", "span": None})
        truth[f"t{n:03}", SKILL] = str(real)
    return pairs, truth


def gap(pairs, label_of):
    n = Counter((p["side"], label_of(p)) for p in pairs)
    rate = lambda side: n[side, "LACKING"] / (n[side, "LACKING"] + n[side, "PRESENT"])
    return rate("failed") - rate("passed")


def test_the_audited_gap_is_right_on_average():
    pairs, truth = population()
    named, real = gap(pairs, lambda p: p["label"]), gap(pairs, lambda p: truth[p["id"], SKILL])
    found = [reweighted_gap(sample_pairs(pairs, 48, seed), truth).iloc[0] for seed in range(60)]
    assert abs(named - real) > .08 and all(f.gap == pytest.approx(named) for f in found)
    assert abs(np.mean([f.gap_audited for f in found]) - real) < .03
    assert np.mean([f.low <= real <= f.high for f in found]) >= .8


def test_judging_everything_gives_the_truth():
    pairs, truth = population()
    sample = sample_pairs(pairs, len(pairs))
    assert len(sample.pairs) == len(pairs)
    assert reweighted_gap(sample, truth).gap_audited[0] == pytest.approx(gap(pairs, lambda p: truth[p["id"], SKILL]))
    lacking = [p for p in pairs if p["label"] == "LACKING"]
    assert audit_result(sample, truth).precision[0] == pytest.approx(sum(truth[p["id"], SKILL] == "LACKING" for p in lacking) / len(lacking))


def test_the_sample_does_not_depend_on_the_order_of_the_file():
    trajectories = [episode("base", f"{n}", 0, n % 3 == 0) for n in range(40)]
    rows = [r | {"run": run} for run in (1, 2, 3) for r in hostile_rows(trajectories[run:] + trajectories[:run])]
    turned = audit_sample(rows[::-1], trajectories[::-1], n=20, seed=5)
    assert turned.pairs == audit_sample(rows, trajectories, n=20, seed=5).pairs and turned.key == audit_sample(rows, trajectories, n=20, seed=5).key
    assert turned.pairs != audit_sample(rows, trajectories, n=20, seed=6).pairs


def test_of_equally_many_votes_the_milder_label_wins():
    votes = [{"id": "a", "capability": SKILL, "label": label, "run": n} for n, label in enumerate(("LACKING", "NA", "PRESENT"))]
    assert labelled_pairs(votes, {"a": "failed"})[0]["label"] == "NA" and labelled_pairs(votes[::2], {"a": "failed"})[0]["label"] == "PRESENT"


# --- the commands

@pytest.fixture
def labelled(tmp_path):
    "A labels folder without rows, as other TRACE users have it, and its trajectories."
    trajectories = [episode("base", f"{n:02}", 0, n % 2 == 0) for n in range(24)]
    label = lambda n: LABELS[n % 3]
    lists = {f"{kind.lower()}_{side}": [t.id for n, t in enumerate(trajectories) if label(n) == kind and t.success == (side == "passed")] for kind in LABELS for side in ("failed", "passed")}
    write_labels([{"run": 1, "totals": {"total_failed": 12, "total_passed": 12}, "labels": {SKILL: lists}}], [], tmp_path/"labels")
    (tmp_path/"labels"/"labels.jsonl").unlink()
    write_trajectories(trajectories, tmp_path/"log.jsonl")
    return tmp_path


def saved(labelled, verdict, **changes):
    "What the page saves when every pair gets the same verdict."
    page = (labelled/"audit.html").read_text()
    facts = {k: v for k, v in re.findall(r'data-(n|seed|key)="([^"]*)"', page)}
    verdicts = [{"id": id, "capability": c, "verdict": verdict} for id, c in re.findall(r'data-id="([^"]*)" data-capability="([^"]*)"', page)]
    (labelled/"verdicts.json").write_text(json.dumps({"n": int(facts["n"]), "seed": int(facts["seed"]), "key": facts["key"], "verdicts": verdicts} | changes))
    return labelled/"verdicts.json"


def test_from_labels_to_report(labelled):
    assert "12 of 24 labels drawn from 3 groups" in audit_labels(labelled/"labels", labelled/"log.jsonl", labelled/"audit.html", n=12)
    report = audit_report(labelled/"labels", saved(labelled, "LACKING"))
    assert "12 of 12 pairs judged, sampled from 24" in report and re.search(rf"{SKILL} +12 +6 +1.00", report)


def test_bad_input_leaves_an_earlier_page(labelled):
    (labelled/"audit.html").write_text("earlier")
    (labelled/"other.jsonl").write_text((labelled/"log.jsonl").read_text().splitlines()[0] + "\n")
    write_trajectories([replace(t, success=not t.success) for t in read_log(labelled/"log.jsonl")[0]], labelled/"twin.jsonl")      # the same ids, another agent
    for options, fault in (({"n": 2}, "ask for 3 or more"), ({"trajectories": labelled/"other.jsonl"}, "the trajectories lack desk:retail/"), ({"trajectories": labelled/"twin.jsonl"}, "ended otherwise than the labels"), ({"labels": labelled}, "holds no run_NN.json"), ({"out": labelled/"labels"/"run_01.json"}, "is no name for a page")):
        with pytest.raises(InputError, match=fault) as e: audit_labels(**{"labels": labelled/"labels", "trajectories": labelled/"log.jsonl", "out": labelled/"audit.html", "n": 12} | options)
        assert "\n" not in str(e.value)
    assert (labelled/"audit.html").read_text() == "earlier" and read_json(labelled/"labels"/"run_01.json")["run"] == 1


@pytest.mark.parametrize("row", ["[]", "{", '{"id": ["a"], "capability": "b", "label": "NA"}', '{"id": "a", "capability": "b", "label": "maybe"}', '{"id": "a", "capability": "b", "label": "NA", "span": ["x"]}', '{"id": "a", "capability": "b", "label": "NA", "evidence": 3}'])
def test_broken_rows_are_named(labelled, row):
    (labelled/"labels"/"labels.jsonl").write_text(row + "\n")
    with pytest.raises(InputError, match="labels.jsonl, line 1: "): audit_labels(labelled/"labels", labelled/"log.jsonl", labelled/"audit.html", n=12)
    assert not (labelled/"audit.html").exists()


def test_verdicts_must_belong_to_the_labels(labelled):
    audit_labels(labelled/"labels", labelled/"log.jsonl", labelled/"audit.html", n=12)
    for changes, fault in (({"key": "0" * 16}, "about other labels"), ({"seed": 3}, "about other labels"), ({"n": "12"}, "no verdicts of an audit"), ({"verdicts": [{"id": "x", "capability": "y", "verdict": "NA"}]}, "was not in the sample"),
                           ({"verdicts": [{"id": "x"}]}, "verdict 1: expected id")):
        with pytest.raises(InputError, match=fault): audit_report(labelled/"labels", saved(labelled, "NA", **changes))
