from tool_sandbox.common.execution_context import get_current_context
from tool_sandbox.tools import TOOLS


class BaseRole:
    role_type = None

    @staticmethod
    def get_messages(ending_index=None):
        rows = get_current_context().rows
        return list(rows if ending_index is None else rows[:ending_index + 1])

    @staticmethod
    def add_messages(messages):
        rows = get_current_context().rows
        for m in messages:
            if m.conversation_active is None: m.conversation_active = rows[-1].conversation_active if rows else True
            rows.append(m)

    @classmethod
    def get_available_tools(cls): return {n: f for n, f in TOOLS.items() if n in get_current_context().allowed}
