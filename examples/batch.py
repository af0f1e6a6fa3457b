"""Runs a batch of requests with OpenAI's client: python -m examples.batch [URL]

The server needs a folder for files: pageant serve --files-dir DIR
"""

from __future__ import annotations

import json
import sys
import time

from openai import OpenAI

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
client = OpenAI(base_url=f"{url}/v1", api_key="none")
prompts = {"dragon": "Once upon a time there was a dragon", "rain": "One day it rained", "cat": "The cat said"}
lines = [
    json.dumps(
        {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": {"prompt": prompt, "max_tokens": 20}}
    )
    for name, prompt in prompts.items()
]

file = client.files.create(file=("prompts.jsonl", "\n".join(lines).encode()), purpose="batch")
batch = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
while batch.status not in ("completed", "failed", "expired", "cancelled"):
    time.sleep(0.5)
    batch = client.batches.retrieve(batch.id)
assert batch.output_file_id, batch.errors
for line in client.files.content(batch.output_file_id).text.splitlines():
    result = json.loads(line)  # in the order in which they were done
    print(f"{result['custom_id']}: {result['response']['body']['choices'][0]['text']!r}")
