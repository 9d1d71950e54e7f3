import datetime
import uuid

from tool_sandbox.common.execution_context import get_current_context


def setting(): return get_current_context().world


def set_wifi_status(on: bool):
    "Switch wifi."
    if type(on) is not bool: raise TypeError("Parameter 'on' is not a bool.")
    if setting()["wifi"] == on: raise ValueError(f"wifi already {'enabled' if on else 'disabled'}")
    setting()["wifi"] = on


def add_note(text: str):
    "Keep a note."
    note = {"id": str(uuid.uuid4()), "text": text, "at": datetime.datetime.now().timestamp()}
    setting()["notes"].append(note)
    return note["id"]


def notes():
    "All notes."
    return setting()["notes"]


def drop(id: str):
    "Remove a note."
    raise LookupError(f"No entry matching {object()} found")


def end_conversation(): get_current_context().rows[-1].conversation_active = False


TOOLS = {f.__name__: f for f in (set_wifi_status, add_note, notes, drop)}
