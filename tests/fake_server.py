"""A server that speaks vLLM's protocol, or SGLang's with `--sglang`, as far as turnrl needs it, and
samples a small model with transformers and peft: `python fake_server.py --model DIR --port PORT
[--...]` in a process, or `FakeServer` in a thread. Its faults: it can be killed and started again,
hang, break off a turn, and give other log-probabilities.

The real servers need environments of their own, of several GB. The slow tests run against them
where there is one.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import os
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import torch

from nodes import free_port


class Refusal(Exception):
    """An error of the protocol: its status, and its message."""


class Model:
    """A model, its adapters, and the weights that it had when each request came."""

    rank_status = 500

    def __init__(self, options: argparse.Namespace) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.options = options
        self.tokenizer = AutoTokenizer.from_pretrained(options.tokenizer or options.model)
        self.base = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
        self.adapters: dict[str, object] = {}
        self.loads: list[str] = []
        self.prompts: list[list[int]] = []
        self.asleep, self.wakes = False, 0
        self.breaks_off = 0
        """Turns that it will break off."""
        self.lock = threading.Lock()

    def load(self, name: str, folder: str) -> None:
        from peft import PeftModel

        if name in self.adapters:
            raise Refusal(400, f"The lora adapter '{name}' has already been loaded.")
        file = Path(folder, "adapter_config.json")
        if not file.is_file():
            raise Refusal(404, f"Loading lora {name} failed: No adapter found for {folder}")
        if json.loads(file.read_text())["r"] > self.options.max_lora_rank:
            raise Refusal(self.rank_status, "Call to add_lora method failed: rank")
        self.loads.append(name)
        self.adapters[name] = PeftModel.from_pretrained(copy.deepcopy(self.base), folder).eval()

    def unload(self, name: str) -> None:
        if self.adapters.pop(name, None) is None:
            raise Refusal(404, f"The lora adapter '{name}' cannot be found.")

    def reload(self, folder: str) -> None:
        from safetensors.torch import load_file

        self.loads.append(Path(folder).name)
        weights = load_file(Path(folder, "model.safetensors"))
        self.base.load_state_dict(weights, strict=False)  # a tied head has no tensor of its own

    def sleep(self) -> None:
        if os.environ.get("VLLM_SERVER_DEV_MODE") != "1":
            raise Refusal(404, "Not Found")
        if self.options.sleepless:
            raise Refusal(500, "Call to sleep method failed: no such allocator")
        self.asleep = True

    def wake(self) -> None:
        if self.options.wakeless:
            raise Refusal(500, "Call to wake_up method failed: out of memory")
        self.asleep, self.wakes = False, self.wakes + 1

    @torch.inference_mode()
    def complete(self, body: dict) -> dict:
        """Sample a turn after each prompt, a token at a time."""
        if self.asleep:
            raise Refusal(400, "it is asleep")
        if body["model"] != "base" and body["model"] not in self.adapters:
            raise Refusal(404, f"The model `{body['model']}` does not exist.")
        network = self.base if body["model"] == "base" else self.adapters[body["model"]]
        several = body["prompt"] if isinstance(body["prompt"][0], list) else [body["prompt"]]
        turns = [self._turn(network, prompt, body) for prompt in several]
        return {"choices": [{"index": n} | turn for n, turn in enumerate(turns)]}

    def _turn(self, network: object, prompt: list[int], body: dict) -> dict:
        ids, logprobs = [], []
        self.prompts.append(prompt)
        if len(prompt) >= self.options.max_model_len:
            raise Refusal(400, f"maximum context length is {self.options.max_model_len} tokens")
        reason, heat = "length", body["temperature"]
        if body["max_tokens"] > 1 and self.breaks_off:  # of a trial's prompts none is
            self.breaks_off -= 1
            return {
                "token_ids": [1],
                "logprobs": {"token_logprobs": [0.0]},
                "finish_reason": "abort",
            }
        for _ in range(body["max_tokens"]):
            read = network(torch.tensor([[*prompt, *ids]]), use_cache=False, logits_to_keep=1)
            logits = read.logits[0, -1].float()
            log_p = (logits / (heat or 1.0)).log_softmax(-1)
            token = int(log_p.exp().multinomial(1) if heat else logits.argmax())
            own = logits.log_softmax(-1) if self.options.raw_logprobs else log_p
            ids.append(token)
            logprobs.append(float(own[token]))
            text = self.tokenizer.decode(ids)
            if token in body.get("stop_token_ids", ()) or any(
                s in text for s in body.get("stop", ())
            ):
                reason = "stop"
                break
        return {
            "token_ids": ids,
            "logprobs": {"token_logprobs": logprobs},
            "finish_reason": reason,
        }

    def gets(self) -> dict[str, object]:
        window = {"id": "base", "owned_by": "vllm", "max_model_len": self.options.max_model_len}
        adapters = [{"id": name, "parent": "base"} for name in self.adapters]
        return {
            "/health": None,
            "/version": {"version": "0.0.0"},
            "/v1/models": {"data": [window, *adapters]},
            "/is_sleeping": {"is_sleeping": self.asleep},
            # which vLLM has not: weights that it was ever given, and how often it was woken
            "/loads": self.loads,
            "/wakes": self.wakes,
        }

    def posts(self, body: dict) -> dict[str, Callable[[], object]]:
        verbs = {
            "/v1/completions": lambda: self.complete(body),
            "/sleep?level=1": self.sleep,
            "/wake_up": self.wake,
            "/collective_rpc": lambda: self.reload(body["kwargs"]["weights_path"]),
        }
        if self.options.adapters:
            verbs["/v1/load_lora_adapter"] = lambda: self.load(body["lora_name"], body["lora_path"])
            verbs["/v1/unload_lora_adapter"] = lambda: self.unload(body["lora_name"])
        return verbs


class SGLangModel(Model):
    """The same, asked as SGLang is, with the messages that it gave."""

    rank_status = 400

    def load(self, name: str, folder: str) -> dict:
        if not self.options.adapters:
            raise Refusal(400, "LoRA is not enabled. Please set `--enable-lora` to enable LoRA.")
        if name in self.adapters:
            raise Refusal(400, f"Failed to load LoRA adapter {name} because it is already loaded")
        super().load(name, folder)
        return {"success": True, "error_message": ""}

    def unload(self, name: str) -> dict:
        if self.adapters.pop(name, None) is None:
            raise Refusal(400, f"LoRA with name {name} does not exist.")
        return {"success": True}

    def update(self, body: dict) -> dict:
        self.reload(body["model_path"])
        return {"success": True, "message": "Succeeded to update model weights."}

    @torch.inference_mode()
    def generate(self, body: dict) -> dict | list[dict]:
        """Sample a turn after each prompt."""
        name, asked = body.get("lora_path"), body["sampling_params"]
        if name is not None and name not in self.adapters:
            raise Refusal(400, f"Got LoRA adapter that has never been loaded: {name}")
        network = self.base if name is None else self.adapters[name]
        several = isinstance(body["input_ids"][0], list)
        prompts = body["input_ids"] if several else [body["input_ids"]]
        ends = () if asked["ignore_eos"] else asked.get("stop_token_ids", ())
        as_vllm = asked | {"max_tokens": asked["max_new_tokens"], "stop_token_ids": ends}
        answers = []
        for prompt in prompts:
            turn = self._turn(network, prompt, as_vllm)
            ids, logprobs = turn["token_ids"], turn["logprobs"]["token_logprobs"]
            why = {"type": turn["finish_reason"]}
            if why["type"] == "stop":
                why["matched"] = ids[-1] if ids[-1] in ends else "a stop string"
            triples = [[logprob, token, None] for logprob, token in zip(logprobs, ids, strict=True)]
            meta = {"finish_reason": why, "output_token_logprobs": triples}
            answers.append({"output_ids": ids, "meta_info": meta})
        return answers if several else answers[0]

    def gets(self) -> dict[str, object]:
        window = {"id": self.options.model, "max_model_len": self.options.max_model_len}
        adapters = [{"id": name, "parent": "base"} for name in self.adapters]
        settings = {
            "version": "0.0.0",
            "max_req_input_len": self.options.max_model_len - 6,
        }
        return {
            "/health": None,
            "/server_info": settings,
            "/v1/models": {"data": [window, *adapters]},
            "/loads": self.loads,
        }

    def posts(self, body: dict) -> dict[str, Callable[[], object]]:
        return {
            "/generate": lambda: self.generate(body),
            "/load_lora_adapter": lambda: self.load(body["lora_name"], body["lora_path"]),
            "/unload_lora_adapter": lambda: self.unload(body["lora_name"]),
            "/update_weights_from_disk": lambda: self.update(body),
        }


class Handler(BaseHTTPRequestHandler):
    """One request."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else an answer's body waits 40 ms for the client
    server: Listener

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self.answer(self.server.model.gets())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        verbs = self.server.model.posts(body)
        if self.path in verbs:
            with self.server.model.lock:
                try:
                    return self.answer({self.path: verbs[self.path]()})
                except Refusal as error:
                    status, problem = error.args
                    return self.answer({self.path: {"error": {"message": problem}}}, status)
        return self.answer({})

    def answer(self, known: dict, status: int = 200) -> None:
        self.server.answers.wait()
        key = self.server.model.options.api_key
        if key and self.headers["authorization"] != f"Bearer {key}" and self.path != "/health":
            status, answer = 401, {"error": "Unauthorized"}
        elif self.path in known:
            answer = known[self.path]
        else:
            status, answer = 404, {"detail": "Not Found"}
        data = b"" if answer is None else json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


class Listener(ThreadingHTTPServer):
    """A server at a port.

    Args:
        arguments: Of the command line.
    """

    daemon_threads = True

    def __init__(self, arguments: Sequence[str] | None = None) -> None:
        options = _parsed(arguments)
        self.model = (SGLangModel if options.sglang else Model)(options)
        self.answers = threading.Event()
        """It hangs while this is not set: it accepts connections, and answers nothing."""
        self.answers.set()
        self._connections: list[socket.socket] = []
        super().__init__(("127.0.0.1", options.port), Handler)

    def process_request(self, request: socket.socket, client_address: object) -> None:
        self._connections.append(request)
        super().process_request(request, client_address)

    def handle_error(self, request: socket.socket, client_address: object) -> None:
        if not isinstance(sys.exception(), OSError):  # a client that has left
            super().handle_error(request, client_address)

    def kill(self) -> None:
        """Break off every connection and stop listening, as the end of its process would."""
        self.shutdown()
        self.server_close()
        self.answers.set()
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


class FakeServer:
    """Such a server in a thread of this process: a process takes seconds to start."""

    def __init__(self, model: Path, *options: str) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._options = ["--model", str(model), *options, "--port", str(port)]
        self.start()

    def start(self, *options: str) -> None:
        """Start with a model that has no adapters and its own weights."""
        self.listener = Listener([*self._options, *options])
        threading.Thread(target=self.listener.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def model(self) -> Model:
        """What it serves, and what it was asked."""
        return self.listener.model

    def kill(self) -> None:
        self.listener.kill()

    def hang(self) -> None:
        """Accept connections, and answer nothing."""
        self.listener.answers.clear()


def _parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--tokenizer")
    parser.add_argument("--max-model-len", type=int, default=256)
    parser.add_argument("--max-lora-rank", type=int, default=16)
    parser.add_argument("--api-key", default="")
    parser.add_argument("--no-adapters", dest="adapters", action="store_false")
    parser.add_argument("--raw-logprobs", action="store_true")
    parser.add_argument("--sleepless", action="store_true")
    parser.add_argument("--wakeless", action="store_true")
    parser.add_argument("--sglang", action="store_true")
    return parser.parse_known_args(arguments)[0]


def main(arguments: Sequence[str] | None = None) -> None:
    """Serve until the process is ended."""
    torch.set_num_threads(1)
    Listener(arguments).serve_forever()


if __name__ == "__main__":
    main()
