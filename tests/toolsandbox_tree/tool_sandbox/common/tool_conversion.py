import inspect

KINDS = {bool: "boolean", str: "string"}


def convert_to_openai_tools(tools):
    def one(name, f):
        given = {n: {"type": KINDS[p.annotation]} for n, p in inspect.signature(f).parameters.items()}
        return {"type": "function", "function": {"name": name, "description": f.__doc__, "parameters": {"type": "object", "properties": given, "required": list(given)}}}
    return [one(n, f) for n, f in tools.items()]
