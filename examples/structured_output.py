"""Constrains the answer to a JSON schema: python -m examples.structured_output [URL]"""

from __future__ import annotations

import json
import sys

from openai import OpenAI

SCHEMA = {
    "type": "object",
    "properties": {
        "animal": {"enum": ["fox", "owl", "bear"]},
        "age": {"type": "integer", "minimum": 1, "maximum": 30},
        "is_kind": {"type": "boolean"},
    },
    "required": ["animal", "age", "is_kind"],
    "additionalProperties": False,
}

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
client = OpenAI(base_url=f"{url}/v1", api_key="none")
answer = client.chat.completions.create(
    model=client.models.list().data[0].id,
    messages=[{"role": "user", "content": "Tell me about an animal."}],
    response_format={"type": "json_schema", "json_schema": {"name": "animal", "schema": SCHEMA}},
    max_tokens=100,
)
animal = json.loads(answer.choices[0].message.content or "")
print(animal["animal"], animal["age"], animal["is_kind"])
