"A small vLLM on 127.0.0.1: pocket answers in process, adapters come and go by name, and it can be told to misbehave."
import json, random, sys, threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch
from peft import PeftModel

from trace_nb.core.decoder import Decoder, Shared
from trace_nb.core.policy import load_model


class FakeVLLM:
    """Use with `with`. Faults to switch on: `ignore` (loads are acknowledged and not used), `stale` (the first adapter answers under every name), `bias` (logits are multiplied
    while sampling, as by another kernel), `closed` (no loading while it runs), `raw` (log-probabilities from before the temperature: vLLM's default). `restart()` forgets all adapters."""
    def __init__(self, **faults):
        self.ignore = self.stale = self.closed = False
        self.bias, self.raw, self.stop_after = 1., True, None
        vars(self).update(faults)
        self.model, self.tokenizer = load_model("pocket")
        self.adapters, self.decoders, self.bodies, self.loads, self.lock, self.number, self.gone = {}, {}, [], [], threading.Lock(), 0, False
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Handler,), {"fake": self}))
        self.server.daemon_threads, self.server.handle_error, self.broken = True, self.remember, None
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"

    def __enter__(self):
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": .05}, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.gone = True     # also for connections that are kept open
        self.server.shutdown(); self.server.server_close()
        if self.broken: raise self.broken

    def remember(self, *_):
        error = sys.exception()
        if not isinstance(error, OSError): self.broken = error

    def restart(self): self.adapters.clear(); self.decoders.clear()

    def load(self, name, path):
        "None, or status and words of the refusal."
        if self.closed: return 404, "Not Found"
        if name in self.adapters: return 400, f"The lora adapter '{name}' has already been loaded."
        self.loads.append(name); self.number += 1
        inner = f"a{self.number}"
        try:
            if isinstance(self.model, PeftModel): self.model.load_adapter(path, adapter_name=inner)
            else: self.model = PeftModel.from_pretrained(self.model, path, adapter_name=inner).eval()
        except (OSError, ValueError) as e: return 400, f"No adapter found for {name}: {type(e).__name__}"
        self.adapters[name] = None if self.ignore else next(iter(self.adapters.values()), inner) if self.stale else inner

    def decoder(self, name):
        if name not in self.decoders: self.decoders[name] = Decoder(self.model, [self.adapters.get(name)])
        return self.decoders[name]

    def prompt_logps(self, ids, name):
        "From transformers' own forward pass."
        adapter = self.adapters.get(name)
        if adapter: self.model.set_adapter(adapter)
        elif isinstance(self.model, PeftModel):
            with self.model.disable_adapter(): return self._scored(ids)
        return self._scored(ids)

    @torch.no_grad()
    def _scored(self, ids):
        ids = torch.tensor([ids])
        return self.model(input_ids=ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0].tolist()

    def generate(self, body):
        "Ids, the log-probability of each, the best log-probability of each place, why it ended."
        rng, heat, cache = random.Random(body.get("seed")), body.get("temperature", 1.), Shared(self.decoder(body["model"]), [0])
        ids, logps, best, piece = [], [], [], tuple(body["prompt"])
        while len(ids) < body["max_tokens"]:
            logits = cache.feed([piece])[0] * self.bias
            sampled, reported = (logits / (heat or 1.)).log_softmax(-1), (logits if self.raw else logits / (heat or 1.)).log_softmax(-1)
            token = int(sampled.argmax()) if not heat else int(torch.searchsorted(sampled.double().exp().cumsum(0), rng.random()).clamp(max=len(sampled) - 1))
            ids.append(token); logps.append(float(reported[token])); best.append(float(reported.max())); piece = (token,)
            if token in body.get("stop_token_ids", [self.tokenizer.eos_token_id]): return ids, logps, best, "stop"
        return ids, logps, best, "length"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_GET(self):
        names = [{"id": "pocket", "object": "model", "max_model_len": 2048}, *({"id": n, "object": "model", "parent": "pocket"} for n in self.fake.adapters)]
        self.give(200, {"object": "list", "data": names} if self.path == "/v1/models" else {})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.fake.gone: self.close_connection = True; return
        with self.fake.lock: status, content = getattr(self, self.path.rsplit("/", 1)[1])(body)
        self.give(status, content if status == 200 else {"error": {"message": content, "code": status}})

    def load_lora_adapter(self, body): return self.fake.load(body["lora_name"], body["lora_path"]) or (200, f"Success: LoRA adapter '{body['lora_name']}' added successfully.")

    def unload_lora_adapter(self, body):
        if body["lora_name"] not in self.fake.adapters: return 404, f"The lora adapter '{body['lora_name']}' cannot be found."
        self.fake.adapters.pop(body["lora_name"]); self.fake.decoders.pop(body["lora_name"], None)
        return 200, "Success"

    def completions(self, body):
        f = self.fake; f.bodies.append(body)
        if f.stop_after is not None and len(f.bodies) > f.stop_after: f.restart(); f.stop_after = None
        if body["model"] not in ("pocket", *f.adapters): return 404, f"The model `{body['model']}` does not exist."
        ids, logps, best, why = f.generate(body)
        choice = {"index": 0, "text": "", "finish_reason": why, "token_ids": ids, "prompt_token_ids": body["prompt"]}
        if "logprobs" in body: choice["logprobs"] = {"token_logprobs": logps, "top_logprobs": [{"a": b} for b in best], "tokens": [""] * len(ids), "text_offset": []}
        if "prompt_logprobs" in body: choice["prompt_logprobs"] = [None, *({str(i): {"logprob": p}} for i, p in zip(body["prompt"][1:], f.prompt_logps(body["prompt"], body["model"])))]
        return 200, {"id": "x", "object": "text_completion", "created": 0, "model": body["model"], "choices": [choice], "usage": {"prompt_tokens": len(body["prompt"]), "completion_tokens": len(ids), "total_tokens": 0}}

    def give(self, status, content):
        data = (content if isinstance(content, str) else json.dumps(content)).encode()
        self.send_response(status)
        for k, v in {"content-type": "text/plain" if isinstance(content, str) else "application/json", "content-length": len(data)}.items(): self.send_header(k, str(v))
        self.end_headers(); self.wfile.write(data)

    def log_message(self, *_): pass
