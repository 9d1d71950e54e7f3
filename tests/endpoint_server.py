"A scripted OpenAI-compatible server on 127.0.0.1: a good, a sloppy and a failing endpoint for the tests."
import hashlib, json, re, sys, threading, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

LABELS = ("LACKING", "PRESENT", "NA")


def draw(*parts) -> int:
    "A number below 2**32 that depends on its parts alone."
    return int.from_bytes(hashlib.sha256("/".join(map(str, parts)).encode()).digest()[:4], "big")


def truth(ticket, capability) -> str:
    "The label that the server gives to a record that mentions this ticket."
    return LABELS[draw(ticket, capability) % 3]


def text_of(body): return "\n".join(m["content"] for m in body["messages"])


def asked(body) -> tuple: # {record: ticket}, capabilities
    "What a request for labels asks about, read from its text as a model would."
    system, user = (m["content"] for m in body["messages"])
    records = {block.split()[0]: re.search(r"ticket (\d+)", block)[1] for block in re.split(r"(?m)^### (?=T\d)", user)[1:]}
    return records, re.findall(r"(?m)^- (\w+): ", system)


def entry(record, ticket, capability):
    return {"record": record, "capability": capability, "label": truth(ticket, capability), "message": 1, "quote": f"ticket {ticket}", "reason": "As seen."}


def good(body) -> str:
    "Every pair, as asked; two capabilities when asked to name some."
    if "Name the capabilities" in text_of(body):
        return json.dumps({"capabilities": [{"name": n, "description": d, "records": ["T1"]} for n, d in
                                            (("ticket_lookup", "Look a ticket up before acting on it."), ("Ticket look-up", "Find tickets."), ("counting", "Get counts right."))]})
    records, names = asked(body)
    return json.dumps({"labels": [entry(r, t, c) for r, t in records.items() for c in names]})


def sloppy(body) -> str:
    "Renames, forgets, contradicts itself, talks around and breaks off; alone with two records it leaves nothing out."
    records, names = asked(body)
    few, kind = len(records) <= 2, draw(text_of(body)) % 4
    labels = [entry(r, t, c) | {"capability": c.replace("_", " ").title() if draw(r, c) % 2 else c} for r, t in records.items() for c in names]
    if not few and kind == 0: labels = [e for e in labels if e["record"] != "T1"] + [labels[-1] | {"record": "T77"}, {"note": "no label"}]
    if not few and kind == 1: labels.append(labels[0] | {"label": next(x for x in LABELS if x != labels[0]["label"])})
    said = json.dumps({"labels": labels + labels[:1]}, indent=1)
    if not few and kind == 2: said = said[:len(said) * 2 // 3]
    return f"<think>They want {{\"labels\": []}}.</think>Here you are:\n```json\n{said}\n```\nAnything else?"


def failing(share=.2, kinds=("429", "500", "disconnect", "cut", "page", "429", "500", "disconnect", "cut", "timeout")):
    "A share of all attempts fails; which ones depends on the request and on how often it came."
    def fault(body, times):
        chance = draw("fault", text_of(body), body["model"], times)
        return kinds[chance // 1000 % len(kinds)] if chance % 1000 < 1000 * share else None
    return fault


class EndpointServer:
    "Serves `reply(body) -> text`; `fault(body, times) -> kind or None` spoils attempts. Use with `with`."
    def __init__(self, reply=good, fault=lambda body, times: None, pause=0.):
        self.reply, self.fault, self.pause = reply, fault, pause
        self.bodies, self.answered, self.faults, self.keys, self.times, self.tokens = [], 0, [], set(), {}, 0
        self.lock, self.closing = threading.Lock(), threading.Event()
        handler = type("Handler", (Handler,), {"endpoint": self})
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.server.daemon_threads, self.server.handle_error = True, self.remember
        self.broken = None    # an exception of the script itself
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"

    def __enter__(self):
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": .05}, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.closing.set(); self.server.shutdown(); self.server.server_close()
        if self.broken: raise self.broken

    def remember(self, *_):
        error = sys.exception()
        if not isinstance(error, OSError): self.broken = error


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_POST(self):
        e, body = self.endpoint, json.loads(self.rfile.read(int(self.headers["content-length"])))
        with e.lock:
            e.bodies.append(body); e.keys.add(self.headers.get("authorization"))
            key = json.dumps(body, sort_keys=True)
            times = e.times[key] = e.times.get(key, 0) + 1
            kind = e.fault(body, times)
            if kind: e.faults.append(kind)
        if e.pause: time.sleep(e.pause)
        if kind: return self.spoil(kind)
        text = e.reply(body)
        usage = {"prompt_tokens": len(text_of(body)) // 4, "completion_tokens": len(text) // 4}
        with e.lock: e.answered += 1; e.tokens += sum(usage.values())
        self.give(200, {"id": "x", "object": "chat.completion", "created": 0, "model": body["model"], "usage": usage,
                        "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}]})

    def spoil(self, kind):
        "One way to fail; a number is a status, with the caller's key in the message."
        if kind == "timeout": self.endpoint.closing.wait(30); kind = "disconnect"
        if kind == "disconnect": self.close_connection = True; return
        if kind == "page": return self.give(200, "<html>Bad gateway</html>")
        if kind == "cut": return self.give(200, {"choices": []}, length=5000)
        status, _, said = kind.partition(" ")
        self.give(int(status), {"error": {"message": said or f"no, {self.headers.get('authorization')}"}}, {"retry-after": "0.05"} if status == "429" else {})

    def give(self, status, content, headers={}, length=None):
        data = content.encode() if isinstance(content, str) else json.dumps(content).encode()
        self.close_connection = length is not None
        self.send_response(status)
        for name, value in {"content-type": "text/html" if isinstance(content, str) else "application/json", "content-length": length or len(data), **headers}.items(): self.send_header(name, str(value))
        self.end_headers(); self.wfile.write(data)

    def log_message(self, *_): pass
