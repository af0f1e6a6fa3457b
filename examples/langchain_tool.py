"""LangChain: a tool that the model has to call: python -m examples.langchain_tool [URL]

Needs `pip install langchain-openai`, and pageant serve --tool-call-parser hermes
"""

from __future__ import annotations

import sys
from typing import Literal

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI


@tool
def weather(place: Literal["forest", "river", "village"]) -> str:
    """The weather at a place"""
    return f"The {place} has sun."


url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
model = ChatOpenAI(model="pageant-stories", base_url=f"{url}/v1", api_key="none", max_tokens=60, use_responses_api=True)
answer = model.bind_tools([weather], tool_choice="weather").invoke("Is it sunny at the river?")
for call in answer.tool_calls:
    print(call["name"], call["args"]["place"])
    print(weather.invoke(call["args"]))
