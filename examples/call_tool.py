"""Lets the model call a function: python -m examples.call_tool [URL]

The server needs to know how the model writes calls: pageant serve --tool-call-parser hermes
"""

from __future__ import annotations

import json
import sys
from typing import Any

from openai import OpenAI

TOOL: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather at a place",
        "parameters": {
            "type": "object",
            "properties": {
                "place": {"enum": ["forest", "river", "village"]},
                "day": {"enum": ["today", "tomorrow"]},
            },
            "required": ["place", "day"],
        },
    },
}


def weather(place: str, day: str) -> str:
    return f"The {place} has sun {day}."


url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
client = OpenAI(base_url=f"{url}/v1", api_key="none")
answer = client.chat.completions.create(
    model=client.models.list().data[0].id,
    messages=[{"role": "user", "content": "Is it sunny at the river?"}],
    tools=[TOOL],
    tool_choice="required",
    parallel_tool_calls=False,
    max_tokens=100,
)
for call in answer.choices[0].message.tool_calls or []:
    if call.type == "function":
        print(call.function.name, call.function.arguments)
        print(weather(**json.loads(call.function.arguments)))
