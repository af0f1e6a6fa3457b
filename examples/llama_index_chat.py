"""LlamaIndex: a streamed chat: python -m examples.llama_index_chat [URL]

Needs `pip install llama-index-llms-openai-like`
"""

from __future__ import annotations

import sys

from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
model = OpenAILike(
    model="pageant-stories", api_base=f"{url}/v1", api_key="none", is_chat_model=True, context_window=512, max_tokens=40
)
for chunk in model.stream_chat([ChatMessage(role="user", content="A story about a fox")]):
    print(chunk.delta, end="", flush=True)
print()
