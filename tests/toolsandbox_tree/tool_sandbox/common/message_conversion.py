import json
from dataclasses import dataclass


@dataclass
class Message:
    sender: str
    recipient: str
    content: str
    openai_tool_call_id: str | None = None
    openai_function_name: str | None = None
    conversation_active: bool | None = None
    visible_to: list | None = None
    def __post_init__(self): self.visible_to = self.visible_to or [self.sender, self.recipient]


def openai_tool_call_to_python_code(call, available, execution_facing_tool_name):
    name = call.function.name
    if name not in available: raise KeyError(f"{name} is not allowed")
    return f"{call.id}_given = {json.loads(call.function.arguments)}\nprint(repr({execution_facing_tool_name or name}(**{call.id}_given)))"
