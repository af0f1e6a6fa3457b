"""LiteLLM: the same question by OpenAI's API and by Anthropic's: python -m examples.litellm_both [URL]

Needs `pip install litellm`
"""

from __future__ import annotations

import sys

import litellm

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
for name, base in (("openai/pageant-stories", f"{url}/v1"), ("anthropic/pageant-stories", url)):
    answer = litellm.completion(
        model=name,
        api_base=base,
        api_key="none",
        messages=[{"role": "user", "content": "A story about a fox"}],
        temperature=0,
        max_tokens=40,
    )
    print(name.partition("/")[0], answer.choices[0].message.content)
