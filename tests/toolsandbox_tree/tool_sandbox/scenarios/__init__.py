import copy
import random
from types import SimpleNamespace

from tool_sandbox.common.execution_context import Context, RoleType as R, ScenarioCategories as C
from tool_sandbox.common.message_conversion import Message
from tool_sandbox.tools import TOOLS


def verdict(wanted):
    def evaluate(execution_context, max_turn_count):
        done = 1.0 if wanted is None else float(wanted(execution_context.world))
        return SimpleNamespace(similarity=done, milestone_similarity=done, minefield_similarity=0.0, turn_count=len(execution_context.rows))
    return SimpleNamespace(evaluate=evaluate)


def scenario(request, wanted, categories):
    context = Context(["end_conversation", *TOOLS], {"wifi": True, "notes": []})
    rows = [Message(R.SYSTEM, R.EXECUTION_ENVIRONMENT, f"from tool_sandbox.tools import {', '.join(TOOLS)}, end_conversation"), Message(R.SYSTEM, R.AGENT, "Do as asked."),
            Message(R.USER, R.AGENT, "An example.", visible_to=[R.USER]), Message(R.SYSTEM, R.USER, f"You want this: {request}"), Message(R.USER, R.AGENT, request)]
    for m in rows: m.conversation_active = True
    context.rows += rows
    random.shuffle(context.allowed)
    return SimpleNamespace(starting_context=context, evaluation=verdict(wanted), categories=categories, max_messages=12)


def named_scenarios(preferred_tool_backend):
    found = {"wifi_off": scenario("Turn wifi off.", lambda w: not w["wifi"], [C.SINGLE_TOOL_CALL, C.NO_DISTRACTION_TOOLS]),
             "keep_note": scenario("Note: milk.", lambda w: [n["text"] for n in w["notes"]] == ["milk"], [C.SINGLE_TOOL_CALL, C.NO_DISTRACTION_TOOLS]),
             "keep_note_alt": scenario("Write down milk.", lambda w: [n["text"] for n in w["notes"]] == ["milk"], [C.SINGLE_TOOL_CALL, C.NO_DISTRACTION_TOOLS]),
             "find_note_insufficient_information": scenario("Find it.", None, [C.INSUFFICIENT_INFORMATION, C.NO_DISTRACTION_TOOLS])}
    found["wifi_off_3_distraction_tools"] = copy.copy(found["wifi_off"])
    found["wifi_off_3_distraction_tools"].categories = [C.THREE_DISTRACTION_TOOLS]
    return found
