"Planted faults: each is caught by the check that is named for it, while the same environment without the fault passes."
import datetime
import inspect
import json
import random
import re
import textwrap
import time

import pytest

from trace_nb.core.policy import Scripted, load_policy
from trace_nb.core.trajectory import InputError
from trace_nb.synthesize.capabilities import environments
from trace_nb.synthesize.calibration import at_difficulty, calibrate
from trace_nb.synthesize.sanity import SCRIPTED_CHECKS, THRESHOLDS, check, check_environment, check_table, failed, play, plot_checks

NULLS = ("cancel_reason", "exchange_items", "exchange_new_items", "exchange_payment_method_id", "exchange_price_difference", "return_items", "return_payment_method_id")


class Orders:
    "Cancel or return one to three orders, those whose status allows it, and say so."
    capability, domain, max_turns = "precondition_verification", "retail", 14
    policy_text = "You are a retail agent. Read an order before you change it. Cancel only what is pending, return only what is delivered."

    def reset(self, seed=0, difficulty=.5, flip=False, **row):
        rng = random.Random(f"orders-{seed}")
        self._orders, self._wanted, self._looked, self._writes, self._said = {}, [], set(), [], ""
        for n in range(1 + sum(difficulty > bar for bar in (.15, .4, .65, .9))):
            self._draw(rng, flip and n == 0)
        return self._request()

    def _draw(self, rng, flip):
        id, cancel, allowed = f"#W{rng.randrange(10**6, 10**7)}", rng.random() < .5, rng.random() < .5
        status = ("pending" if cancel else "delivered") if allowed != flip else "processed"
        items = [{"name": rng.choice(["Lamp", "Tent", "Mouse", "Jacket", "Kettle", "Chair"]), "product_id": str(rng.randrange(10**9, 10**10)), "item_id": str(rng.randrange(10**9, 10**10)),
                  "price": rng.randrange(20, 500) + .5, "options": {"color": rng.choice(["red", "navy", "olive", "white"]), "size": rng.choice(["S", "M", "L"])}}]
        paid = {"transaction_type": "payment", "amount": items[0]["price"], "payment_method_id": f"paypal_{rng.randrange(10**6, 10**7)}"}
        self._orders[id] = {"order_id": id, "user_id": "mia_li_3668", "items": items, "status": status, "payment_history": [paid], **dict.fromkeys(NULLS)}
        self._wanted.append((id, "cancel" if cancel else "return", status != "processed"))

    def _request(self):
        return f"Please {' and '.join(f'{verb} order {id}' for id, verb, _ in self._wanted)}. All of it is no longer needed."

    def _reply(self, text):
        self._said = text
        return None

    def _gold_writes(self):
        calls = []
        for id, verb, allowed in self._wanted:
            order = self._orders[id]
            if not allowed: continue
            if verb == "cancel": calls.append(("cancel_pending_order", {"order_id": id, "reason": "no longer needed"}))
            else: calls.append(("return_delivered_order_items", {"order_id": id, "item_ids": [order["items"][0]["item_id"]], "payment_method_id": order["payment_history"][0]["payment_method_id"]}))
        return calls

    def _oracle(self):
        looks = [{"name": "get_order_details", "arguments": {"order_id": id}} for id, _, _ in self._wanted]
        words = " ".join(f"Order {id} {verb}: done." if allowed else f"Order {id} cannot be changed." for id, verb, allowed in self._wanted)
        return [*looks, *({"name": n, "arguments": a} for n, a in self._gold_writes()), words]

    def _parts(self):
        looked = self._looked >= set(self._orders) and all(seen for _, _, seen in self._writes)
        right = looked and [(n, a) for n, a, _ in self._writes] == self._gold_writes()
        return {"looked": float(looked), "right": float(right), "told": float(right and self._told())}

    def _told(self):
        sentences = re.split(r"(?<=\.) ", self._said)
        about = [next((s for s in sentences if id in s), "") for id, _, _ in self._wanted]
        return all(s and ("cannot" in s) != allowed for s, (_, _, allowed) in zip(about, self._wanted))

    def get_reward(self):
        parts = self._parts()
        return .1 * parts["looked"] + .5 * parts["right"] + .4 * parts["told"]

    def _twin(self): return {"flip": True}

    def _order(self, id):
        if id not in self._orders: raise ValueError("Order not found")
        return self._orders[id]

    def _write(self, name, id, **arguments):
        self._writes.append((name, {"order_id": id, **arguments}, id in self._looked))
        return self._order(id)

    def get_order_details(self, order_id: str) -> str:
        """
        Get the status and details of an order.

        Args:
            order_id: The order id.
        """
        self._looked.add(order_id)
        return json.dumps(self._order(order_id))

    def cancel_pending_order(self, order_id: str, reason: str) -> str:
        """
        Cancel a pending order.

        Args:
            order_id: The order id.
            reason: Either 'no longer needed' or 'ordered by mistake'.
        """
        order = self._write("cancel_pending_order", order_id, reason=reason)
        if order["status"] != "pending": raise ValueError("Non-pending order cannot be cancelled")
        return json.dumps({**order, "status": "cancelled", "cancel_reason": reason})

    def return_delivered_order_items(self, order_id: str, item_ids: list[str], payment_method_id: str) -> str:
        """
        Return some items of a delivered order.

        Args:
            order_id: The order id.
            item_ids: The item ids to return.
            payment_method_id: The payment method that receives the refund.
        """
        order = self._write("return_delivered_order_items", order_id, item_ids=item_ids, payment_method_id=payment_method_id)
        if order["status"] != "delivered": raise ValueError("Non-delivered order cannot be returned")
        return json.dumps({**order, "status": "return requested", "return_items": sorted(item_ids), "return_payment_method_id": payment_method_id})


class ClockInReset(Orders):
    def _request(self): return f"It is {datetime.date.today()}. {super()._request()}"


class UniversalClock(Orders):
    def _request(self): return f"It is {datetime.datetime.now(datetime.timezone.utc):%Y}. {super()._request()}"


class HashOrder(Orders):
    def _request(self): return f"{super()._request()} I live in {', '.join({'Dallas', 'Austin', 'Boston', 'Miami', 'Denver', 'Seattle'})}."


class GlobalRandom(Orders):
    def _request(self): return f"{super()._request()} My number is {random.random()}."


class SharedCounter(Orders):
    count = 0
    def _request(self):
        SharedCounter.count += 1
        return f"{super()._request()} I am caller {SharedCounter.count}."


class FewTasks(Orders):
    def reset(self, seed=0, **row): return super().reset(seed=seed % 7, **row)


class GoldErrs(Orders):
    def _oracle(self): return [{"name": "get_order_details", "arguments": {"order_id": "W1"}}, *super()._oracle()]


class GoldLoses(Orders):
    def _oracle(self): return [*super()._oracle()[:-1], "It went well."]


class SubstringReward(Orders):
    def get_reward(self): return max(super().get_reward(), .4 * ("cancel" in self._said))


class PaysGivingUp(Orders):
    def get_reward(self): return max(super().get_reward(), .15 * bool(self._looked) + .4 * ("cannot" in self._said or "sorry" in self._said))


class FreeExtraWrites(Orders):
    def _parts(self):
        made = [(n, a) for n, a, _ in self._writes]
        right = self._looked >= set(self._orders) and all(w in made for w in self._gold_writes())
        return {"right": float(right), "told": float(right and self._told()), "looked": float(bool(self._looked))}


class WrongCard(Orders):
    def _write(self, name, id, **arguments):
        if "payment_method_id" in arguments: arguments["payment_method_id"] = self._orders.get(id, {"payment_history": [{"payment_method_id": ""}]})["payment_history"][0]["payment_method_id"]
        return super()._write(name, id, **arguments)


class TwinsDiffer(Orders):
    def reset(self, seed=0, flip=False, **row): return super().reset(seed=seed, flip=flip, **row) + (" I know that one of them was sent." if flip else "")


class NoDifference(Orders):
    def _twin(self): return {}


class LeakedGold(Orders):
    def _request(self): return f"{super()._request()} {json.dumps(self._oracle()[-2])}"


class LeakedCard(Orders):
    def _request(self): return f"{super()._request()} Refund {next(iter(self._orders.values()))['payment_history'][0]['payment_method_id']}."


class RenamedParameter(Orders):
    def get_order_details(self, id: str) -> str:
        """
        Get the status and details of an order.

        Args:
            id: The order id.
        """
        return super().get_order_details(id)

    def _oracle(self): return [{**s, "arguments": {"id": s["arguments"]["order_id"]}} if not isinstance(s, str) and s["name"] == "get_order_details" else s for s in super()._oracle()]


class AllOrNothing(Orders):
    def get_reward(self): return float(super().get_reward() > .99)


class EndsTheProgram(Orders):
    def _order(self, id):
        if not isinstance(id, str): raise SystemExit(0)
        return super()._order(id)


class Misspelt(Orders):
    def _order(self, id): return super()._order(id) if id else nothing      # noqa: F821


class Slow(Orders):
    def _request(self):
        end = time.process_time() + .03
        while time.process_time() < end: pass
        return super()._request()


class TooShort(Orders):
    max_turns = 3


FAULTS = {ClockInReset: "determinism", UniversalClock: "determinism", HashOrder: "determinism", GlobalRandom: "determinism", SharedCounter: "determinism",
          FewTasks: "seed_diversity", GoldErrs: "oracle_max", GoldLoses: "oracle_max", SubstringReward: "adversarial_floor", PaysGivingUp: "adversarial_floor",
          FreeExtraWrites: "adversarial_floor", WrongCard: "adversarial_floor", TwinsDiffer: "counterfactual_twins", NoDifference: "counterfactual_twins",
          LeakedGold: "no_solution_leakage", LeakedCard: "no_solution_leakage", RenamedParameter: "interface_fidelity", AllOrNothing: "reward_range",
          EndsTheProgram: "malformed_calls", Misspelt: "malformed_calls", Slow: "bounds", TooShort: "bounds"}
SEEDS = range(24)


def verdict(environment_class, name):
    return next(c for c in check_environment(environment_class, seeds=SEEDS)["checks"] if c["name"] == name)


def test_without_a_fault_every_check_passes():
    result = check_environment(Orders, seeds=SEEDS)
    assert {c["name"]: c["passed"] for c in result["checks"]} == {n: True if n in SCRIPTED_CHECKS else None for n in THRESHOLDS}, check_table(result)
    assert result["passed"] and result["environment"] == "Orders"
    assert all(set(c) == {"name", "value", "threshold", "passed", "detail"} for c in result["checks"]) and json.loads(json.dumps(result)) == result
    assert all("no policy" in c["detail"] or "none was given" in c["detail"] for c in result["checks"] if c["passed"] is None)


@pytest.mark.parametrize("cls", FAULTS, ids=lambda c: c.__name__)
def test_a_fault_is_caught_by_its_check(cls):
    from trace_nb.synthesize.sanity import run_check
    record = run_check(FAULTS[cls], lambda: SCRIPTED_CHECKS[FAULTS[cls]](cls, SEEDS))
    assert record["passed"] is False, record


def test_a_class_that_no_second_process_finds_is_skipped_not_passed():
    class Local(Orders): pass
    record = verdict(Local, "determinism")
    assert record["passed"] is None and "file.py:Class" in record["detail"]


class ResetBreaks(Orders):
    def _request(self): raise KeyError("database")


class ToolBreaks(Orders):
    def _order(self, id): return self._orderz[id]


class RewardBreaks(Orders):
    def get_reward(self): return 1 / 0


class RewardTooHigh(Orders):
    def get_reward(self): return 2 * super().get_reward()


class ReplyBreaks(Orders):
    def _reply(self, text): return super()._reply(text.split()[99])


@pytest.mark.parametrize("cls, words", [(ResetBreaks, "KeyError: 'database' (test_sanity.py, line"), (ToolBreaks, "has no attribute '_orderz' (test_sanity.py, line"),
                                        (RewardBreaks, "ZeroDivisionError: division by zero (test_sanity.py, line"), (RewardTooHigh, "get_reward() is 2.0, not a number in [0, 1]"),
                                        (ReplyBreaks, "IndexError: list index out of range (test_sanity.py, line")], ids=lambda x: getattr(x, "__name__", ""))
def test_a_crash_is_a_failed_check_with_its_place(cls, words):
    result = check_environment(cls, seeds=range(6))
    assert "oracle_max" in failed(result), check_table(result)
    assert words in next(c["detail"] for c in result["checks"] if c["name"] == "oracle_max")


def half(chance=.5):
    "A base that plays the gold half of the time and apologises otherwise."
    rng = random.Random(0)
    return Scripted("half", lambda env: env._oracle() if rng.random() < chance else ["I am sorry."])


def test_with_a_policy():
    result = check_environment(Orders, half(), seeds=SEEDS, tasks=16, group_size=4)
    assert all(c["passed"] for c in result["checks"]), check_table(result)
    last = check_environment(Orders, load_policy("oracle"), seeds=range(8), tasks=8, group_size=2)
    assert failed(last) == ["base_success", "training_signal"] and "seeds by successes of 2: 0 0 8" in last["checks"][-2]["detail"]
    assert last["checks"][-3]["value"] == 1 and last["checks"][-1]["value"] == 0


def test_truncated_rollouts_are_counted():
    endless = Scripted("endless", lambda env: [{"name": "get_order_details", "arguments": {"order_id": "#W0"}}] * 50)
    record = check_environment(Orders, endless, seeds=range(4), tasks=4, group_size=2)["checks"][-1]
    assert (record["name"], record["value"], record["passed"]) == ("truncation", 1, False) and "8 by the turn limit" in record["detail"]


def test_an_environment_that_breaks_is_no_failure_of_the_agent():
    record = check_environment(ResetBreaks, load_policy("oracle"), seeds=range(4), tasks=4, group_size=2)["checks"][-3]
    assert record["passed"] is False and "8 rollouts broke in the environment" in record["detail"]


@pytest.fixture
def file(tmp_path):
    "A user's file with a good class and faulty ones."
    path = tmp_path/"my orders.py"
    path.write_text("import json, os, random, re, sys\nprint('hello from the file')\n" + f"NULLS = {NULLS!r}\n\n" + inspect.getsource(Orders) + textwrap.dedent("""
        class PaysGivingUp(Orders):
            def get_reward(self): return max(super().get_reward(), .5 * ("sorry" in self._said))

        class Dies(Orders):
            def _twin(self): os._exit(7)

        class Endless(Orders):
            def _reply(self, text):
                while True: pass

        class NoReward:
            def reset(self, seed=0, **row): return "Hello."

        number = 3
        """), encoding="utf-8")
    return path


@pytest.fixture
def few_seeds(monkeypatch):
    from functools import partial
    from trace_nb.synthesize import sanity
    monkeypatch.setattr(sanity, "check_environment", partial(check_environment, seeds=SEEDS, seconds=20))


def test_command_on_a_file(file, few_seeds, tmp_path):
    text, code = check(f"{file}:Orders", json=str(tmp_path/"out.json"))
    assert code == 0 and text.endswith("no check failed") and "hello" not in text, text
    result = json.loads((tmp_path/"out.json").read_text())
    assert result["passed"] is True and result["environment"] == f"{file}:Orders" and [c["name"] for c in result["checks"]] == list(THRESHOLDS)
    text, code = check(f"{file}:PaysGivingUp", "oracle")
    assert code == 1 and text.endswith("failed: adversarial_floor, base_success, training_signal")


def test_a_process_that_dies_or_hangs_is_a_failed_check(file):
    dies = check_environment(f"{file}:Dies", seeds=range(12))
    assert failed(dies) == ["adversarial_floor"] and "exit code 7" in next(c["detail"] for c in dies["checks"] if c["passed"] is False)
    hangs = check_environment(f"{file}:Endless", seeds=range(4), seconds=1)
    assert failed(hangs) == ["bounds"] and "no answer within 1 s (my orders.py, line" in next(c["detail"] for c in hangs["checks"] if c["passed"] is False)


@pytest.mark.parametrize("name, words", [("Nobody", "there are environments for"), ("{file}", "which class?"), ("{file}:", "names no class"), ("nowhere.py:Orders", "no such file"),
                                         ("{file}:Nobody", "no class 'Nobody'.* it has Orders, PaysGivingUp"), ("{file}:number", "no class 'number'"),
                                         ("{file}:NoReward", "no method get_reward"), ("{broken}:Orders", "SyntaxError.*line 1"), ("{text}:Orders", "not a Python file")])
def test_bad_names_are_one_line(file, name, words):
    broken, text = file.with_name("broken.py"), file.with_name("orders.txt")
    broken.write_text("class Orders(:\n"); text.write_text("")
    with pytest.raises(InputError, match=words) as e: check(name.format(file=file, broken=broken, text=text))
    assert "\n" not in str(e.value)


def test_a_bad_policy_or_place_is_refused_before_anything_runs(file, tmp_path):
    with pytest.raises(InputError, match="unknown policy"): check("MultiStepRetail", policy="pocked")
    with pytest.raises(InputError, match="is a folder"): check("MultiStepRetail", json=str(tmp_path))
    with pytest.raises(InputError, match="must be a name"): check_environment(f"{file}:Orders", half())
    with pytest.raises(InputError, match="no method get_reward"): check_environment(type("Half", (), {"reset": lambda self: ""}))


def test_a_capability_is_all_of_its_environments(few_seeds, tmp_path):
    text, code = check("multi_step_task_completion", json=str(tmp_path/"out.json"))
    rows = json.loads((tmp_path/"out.json").read_text())["rows"]
    assert [r["environment"] for r in rows] == [c.__name__ for c in environments("multi_step_task_completion")] and code == int(any(failed(r) for r in rows))


def test_figure():
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib.figure import Figure
    result = {"environment": "Orders", "passed": False, "checks": [{"name": n, "passed": v} for n, v in zip(THRESHOLDS, [True, False, None])]}
    ax = plot_checks([result, result], ax=Figure().add_subplot())
    assert [len(c.get_offsets()) for c in ax.collections] == [2, 2, 2] and [t.get_text() for t in ax.get_legend().get_texts()] == ["passed", "failed", "skipped"]


class Stuck(Orders):
    def reset(self, seed=0, difficulty=.5, **row): return super().reset(seed=seed, **row)


class Manners(Orders):
    def reset(self, seed=0, difficulty=.5, **row): return super().reset(seed=seed, **row) + " Thank you." * round(difficulty * 4)


class Reversed(Orders):
    def reset(self, seed=0, difficulty=.5, **row): return super().reset(seed=seed, difficulty=1 - difficulty, **row)


def careless(chance=.8):
    "Leaves out calls of the gold."
    rng = random.Random(0)
    return Scripted("careless", lambda env: [s for s in env._oracle() if isinstance(s, str) or rng.random() < chance])


def test_calibration_finds_and_confirms():
    found = calibrate(Orders, careless(), seeds=24)
    assert found["confirmed"] and .3 <= found["success"] <= .6 and 0 < found["difficulty"] < 1
    assert found["rollouts"] == sum(m["rollouts"] for m in found["measurements"]) and found["measurements"][-1]["rollouts"] == 2 * 24 * 4
    assert json.loads(json.dumps(found)) == found and found == calibrate(Orders, careless(), seeds=24)


@pytest.mark.parametrize("cls, words, spent", [(Stuck, "there is no knob", 0), (Manners, "the knob is not monotone", 3), (Reversed, "the knob is not monotone", 3)], ids=lambda x: getattr(x, "__name__", ""))
def test_calibration_refuses(cls, words, spent):
    found = calibrate(cls, careless(), seeds=24)
    assert words in found["detail"] and found["difficulty"] is None and found["confirmed"] is None and "\n" not in found["detail"]
    assert found["rollouts"] == spent * 24 * 4


def test_a_setting_keeps_name_and_seed():
    env = at_difficulty(Orders, 1.)
    assert env.__name__ == "Orders" and len(play(env, 3, []).environment._orders) == 5 > len(play(Orders, 3, []).environment._orders)
    with pytest.raises(InputError, match="not between 0 and 1"): at_difficulty(Orders, 2)
