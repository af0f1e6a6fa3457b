"""PydanticAI: an agent whose answer is an object, by Anthropic's API: python -m examples.pydantic_ai_agent [URL]

Needs `pip install 'pydantic-ai-slim[anthropic]'`, and pageant serve --tool-call-parser hermes
"""

from __future__ import annotations

import sys
from typing import Literal

from anthropic import AsyncAnthropic
from pydantic import BaseModel, Field
from pydantic_ai import Agent
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.providers.anthropic import AnthropicProvider


class Animal(BaseModel):
    """An animal of a story"""

    kind: Literal["fox", "owl", "bear"]
    age: int = Field(ge=1, le=30)


url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
provider = AnthropicProvider(anthropic_client=AsyncAnthropic(base_url=url, api_key="none"))
agent = Agent(AnthropicModel("pageant-stories", provider=provider), output_type=Animal)
answer = agent.run_sync("A story about an animal", model_settings={"max_tokens": 60, "parallel_tool_calls": False})
print(answer.output.kind, answer.output.age)
