import contextlib
import copy
import io
import itertools

from tool_sandbox.common.execution_context import RoleType, get_current_context, set_current_context
from tool_sandbox.common.message_conversion import Message
from tool_sandbox.roles.base_role import BaseRole


class ExecutionEnvironment(BaseRole):
    "Runs calls in every order, like the original: the first order that fails decides, and its answers come in that order."
    role_type = RoleType.EXECUTION_ENVIRONMENT

    def respond(self, ending_index=None):
        messages = self.get_messages(ending_index)
        asked = list(itertools.takewhile(lambda m: m.recipient == self.role_type, reversed(messages)))[::-1]
        first, kept = get_current_context(), None
        for order in itertools.permutations(asked):
            set_current_context(copy.deepcopy(first))
            answers = [self.run(m) for m in order]
            kept = kept or (get_current_context(), answers)
            if any(failed for _, failed in answers): kept = get_current_context(), answers; break
        set_current_context(kept[0])
        self.add_messages([a for a, _ in kept[1] if a is not None])

    def run(self, m):
        out, failed = io.StringIO(), False
        with contextlib.redirect_stdout(out):
            try: exec(m.content, get_current_context().names if m.sender == RoleType.SYSTEM else {**get_current_context().names})
            except Exception as e: failed = True; print(f"{type(e).__name__}: {e}")
        if m.sender == RoleType.SYSTEM: get_current_context().names.pop("__builtins__", None); return None, False
        return Message(self.role_type, m.sender, out.getvalue().rstrip(), m.openai_tool_call_id, m.openai_function_name), failed
