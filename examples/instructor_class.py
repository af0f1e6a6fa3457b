"""instructor: an object of a class: python -m examples.instructor_class [URL]

Needs `pip install instructor`, and pageant serve --tool-call-parser hermes
"""

from __future__ import annotations

import sys
from typing import Literal

import instructor
from openai import OpenAI
from pydantic import BaseModel, Field


class Animal(BaseModel):
    """An animal of a story"""

    kind: Literal["fox", "owl", "bear"]
    age: int = Field(ge=1, le=30)


url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
client = instructor.from_openai(OpenAI(base_url=f"{url}/v1", api_key="none"), mode=instructor.Mode.TOOLS)
animal = client.chat.completions.create(
    model="pageant-stories",
    response_model=Animal,
    messages=[{"role": "user", "content": "A story about an animal"}],
    max_tokens=60,
)
print(animal.kind, animal.age)
