from enum import Enum


class RoleType(str, Enum):
    SYSTEM, USER, AGENT, EXECUTION_ENVIRONMENT = "SYSTEM", "USER", "AGENT", "EXECUTION_ENVIRONMENT"


class ScenarioCategories(str, Enum):
    SINGLE_TOOL_CALL, INSUFFICIENT_INFORMATION = "SINGLE_TOOL_CALL", "INSUFFICIENT_INFORMATION"
    NO_DISTRACTION_TOOLS, THREE_DISTRACTION_TOOLS = "NO_DISTRACTION_TOOLS", "THREE_DISTRACTION_TOOLS"
    def __str__(self): return self.value


class Context:
    def __init__(self, allowed, world): self.allowed, self.world, self.rows, self.names = allowed, world, [], {}
    @property
    def max_sandbox_message_index(self): return len(self.rows) - 1
    def get_execution_facing_tool_name(self, name): return name


_current = None
def get_current_context(): return _current
def set_current_context(context): global _current; _current = context
