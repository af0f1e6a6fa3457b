"""Streams a completion with OpenAI's client: python -m examples.stream_openai [URL]"""

from __future__ import annotations

import sys

from openai import OpenAI

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
client = OpenAI(base_url=f"{url}/v1", api_key="none")
model = client.models.list().data[0].id
chunks = client.completions.create(model=model, prompt="Once upon a time", max_tokens=60, seed=7, stream=True)
for chunk in chunks:
    if chunk.choices:
        print(chunk.choices[0].text, end="", flush=True)
print()
