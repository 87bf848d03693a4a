"""A program with SGLang's command line and as much of its interface as an engine's start and a call need.

The folder ``TOY_DIR`` says how it behaves, by the files in it, and gets ``starts`` (a pid for each start),
``environment``, ``arguments`` and ``posts``.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

DIR = Path(os.environ["TOY_DIR"])
VOCABULARY = 4102
ORPHAN = "import os, time\nos.setsid()\nif os.fork() == 0:\n    time.sleep(600)\n"
"""Leaves a process in a session of its own, without a parent."""


def says(name: str) -> str | None:
    """What the file ``name`` of the folder holds; None where there is none."""
    path = DIR / name
    return path.read_text() if path.exists() else None


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    version = "default"
    model = ""

    def do_GET(self) -> None:
        if self.path == "/health":
            self.answer({}, 503 if says("never_ready") is not None else 200)
        elif self.path == "/model_info":
            version = Handler.version if says("nameless") is None else None
            self.answer({"model_path": self.model, "served_model_name": "toy", "weight_version": version})
        elif self.path == "/server_info":
            self.answer({"version": "0.5.23", "context_length": 4096})
        elif self.path == "/v1/models":
            self.answer({"data": [{"id": "toy", "max_model_len": 4096}]})
        else:
            self.answer({"error": "no such path"}, 404)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.path == "/generate":
            self.generate(body)
        elif self.path == "/tokenize":
            from tokenizers import Tokenizer

            tokenizer = Tokenizer.from_file(f"{self.model}/tokenizer.json")
            self.answer(
                {"tokens": [tokenizer.encode(text, add_special_tokens=False).ids for text in body["prompt"]]}
            )
        elif self.path == "/update_weights_from_disk":
            Handler.version = body["weight_version"]
            self.answer({"success": True, "message": "done"})
        else:
            with (DIR / "posts").open("a") as file:
                file.write(f"{self.path} {json.dumps(body)}\n")
            self.answer({})

    def generate(self, body: dict[str, object]) -> None:
        count, version = body["sampling_params"]["max_new_tokens"], Handler.version
        if count > 100:
            (DIR / "generating").touch()
            time.sleep(600)
        meta = {
            "id": body["rid"],
            "finish_reason": {"type": "length", "length": count},
            "weight_version": version,
            "weight_versions": [{"version": version, "start": 0, "end": count}],
            "output_token_logprobs": [[-0.5, 7, None]] * count,
            "completion_tokens": count,
            "cached_tokens": 0,
        }
        self.answer({"text": "", "output_ids": [7] * count, "meta_info": meta})

    def answer(self, value: object, status: int = 200) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """The tests look at the log."""


def say(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model-path", required=True)
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    arguments, further = parser.parse_known_args()
    (DIR / "port").write_text(str(arguments.port))
    with (DIR / "starts").open("a") as file:
        file.write(f"{os.getpid()}\n")
    (DIR / "environment").write_text(json.dumps(dict(os.environ)))
    (DIR / "arguments").write_text(json.dumps(further))
    say("\x1b[31mloading\x1b[0m \u202eweights\x07")
    if says("children") is not None:
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    if says("orphan") is not None:
        orphan = subprocess.Popen([sys.executable, "-c", ORPHAN])
        orphan.wait()
    if says("ignore_term") is not None:
        signal.signal(signal.SIGTERM, lambda *_: (DIR / "terms").write_text("one\n"))
    if (message := says("fails")) is not None:
        say(message)
        sys.exit(3)
    time.sleep(float(says("slow_s") or 0))
    Handler.model = arguments.model_path
    server = ThreadingHTTPServer((arguments.host, arguments.port), Handler)
    if (lives_s := says("lives_s")) is not None:
        threading.Timer(float(lives_s), os._exit, (4,)).start()
    server.serve_forever()


main()
