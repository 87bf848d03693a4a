"""Asks the model TURNS times, PAUSE_S apart, with the whole conversation. The instruction is ``TURNS PAUSE_S``."""

import json
import os
import sys
import time
import urllib.request


def ask(messages: list) -> dict:
    body = json.dumps({"model": "policy", "messages": messages}).encode()
    headers = {"authorization": "Bearer " + os.environ["EPISODE_KEY"], "content-type": "application/json"}
    request = urllib.request.Request(os.environ["MODEL_URL"] + "/v1/chat/completions", body, headers)
    with urllib.request.urlopen(request, timeout=300) as answer:
        message = json.load(answer)["choices"][0]["message"]
    return {name: value for name, value in message.items() if value is not None and name != "tool_calls"}


with open(sys.argv[1], encoding="utf-8") as file:
    turns, pause_s = file.read().split()[:2]
messages = [{"role": "user", "content": "Begin."}]
for turn in range(int(turns)):
    messages.append(ask(messages))
    messages.append({"role": "user", "content": f"Go on with step {turn}. {'word ' * 50}"})
    time.sleep(float(pause_s))
