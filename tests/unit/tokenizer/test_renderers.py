"""Chat templates in their sandbox: what they give, what they cannot do, and what happens to those that try."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from jinja2 import TemplateError

from services.tokenizer.confined.frames import RenderJob
from services.tokenizer.confined.renderers import RendererPool
from services.tokenizer.confined.template import compile_template, render
from shared.errors import RejectCode, RequestError
from shared.messages import ChatMessage
from tests.unit.detokenizer.models import tokenizer

HELLO = [ChatMessage("user", "hello")]
LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% if a and 0 %}x{% endif %}{% endfor %}{% endfor %}"
RECURSION = "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"
ON_DEMAND = "{% if messages[0].content == 'loop' %}" + LOOP + "{% endif %}{{ messages[0].content }}"


@asynccontextmanager
async def pool(
    template: str, special: dict[str, str] | None = None, *, timeout: float = 1.0, size: int = 1
) -> AsyncIterator[RendererPool]:
    made = RendererPool(template, special or {}, timeout=timeout, max_output_bytes=1 << 20, num_renderers=size)
    await made.start()
    try:
        yield made
    finally:
        await made.close()


async def refusal(template: str, messages: list[ChatMessage] = HELLO) -> RequestError:
    async with pool(template) as renderers:
        with pytest.raises(RequestError) as caught:
            await renderers.render(messages)
    assert caught.value.field == "chat"
    assert caught.value.code is RejectCode.INVALID_ARGUMENT
    return caught.value


async def test_qwens_own_template(data_dir: Path) -> None:
    model = tokenizer(data_dir / "tokenizers/qwen3")
    assert model.chat_template is not None
    async with pool(model.chat_template, model.special_tokens) as renderers:
        text = await renderers.render([ChatMessage("system", "Be brief."), ChatMessage("user", "1 < 2 & é?")])
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n1 < 2 & é?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert model.encode_plain(text)[:1] == [model.tokenizer.token_to_id("<|im_start|>")]


async def test_what_templates_of_the_field_rely_on() -> None:
    template = (
        "{{ bos_token }}{% for m in messages %}\n"
        "    {% if m.role == 'tool' %}{% continue %}{% endif %}\n"
        "{{ m['content'] | tojson }}{% generation %}!{% endgeneration %}\n"
        "{% endfor %}\n"
        "{{ strftime_now('%Y') | length }}{{ add_generation_prompt }}{{ tools is none }}"
    )
    async with pool(template, {"bos_token": "<s>"}) as renderers:
        text = await renderers.render([*HELLO, ChatMessage("tool", "x"), ChatMessage("user", "<é>")])
    assert text == '<s>"hello"!"<é>"!4TrueTrue'


async def test_a_template_may_refuse() -> None:
    error = await refusal("{{ raise_exception('roles must alternate') }}")
    assert "roles must alternate" in str(error)


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__.__base__.__subclasses__()[0] }}",
        "{{ raise_exception.__globals__ }}",
        "{{ strftime_now.__globals__['__builtins__'] }}",
        "{{ self.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ lipsum.__globals__['os'] }}",
        "{{ ''|attr('__class__')|attr('__mro__') }}{{ (''|attr('__class__')).mro() }}",
        "{{ '{0.__class__.__init__.__globals__}'.format(raise_exception) }}",
        "{% set x = messages.append({'role': 'user'}) %}",
        "{% include '/etc/passwd' %}",
        "{{ range(10 ** 9) }}",
    ],
)
def test_there_is_no_way_out(template: str) -> None:
    text = ""
    with contextlib.suppress(TemplateError, OverflowError, TypeError):
        text = render(compile_template(template), {}, RenderJob([{"role": "user", "content": "x"}]), 1 << 20)
    assert text == ""  # what the sandbox forbids is an error, or undefined and thus nothing


@pytest.mark.parametrize(
    ("template", "words"),
    [("{% if %}", "does not accept"), (RECURSION, "recurses"), ("{{ 1 // 0 }}", "ZeroDivisionError")],
)
async def test_a_broken_template_is_explained(template: str, words: str) -> None:
    assert words in str(await refusal(template))


@pytest.mark.parametrize(
    "template",
    [
        "{% for a in range(99999) %}{% for b in range(999) %}0123456789{% endfor %}{% endfor %}",
        "{{ 'x' * (2 * 1024 * 1024) }}",
        "{{ messages[0].content * 10 ** 10 }}",
        "{% set n = namespace(x='0123456789') %}{% for a in range(64) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}",
    ],
)
async def test_huge_output_is_capped(template: str) -> None:
    error = await refusal(template)
    assert any(words in str(error) for words in ("too long", "too much memory", "takes more than"))


@pytest.mark.parametrize("character", ["x", "\n", '"', "\x01", "é"])
async def test_what_may_be_written_may_be_any_text(character: str) -> None:
    content = character * ((1 << 20) // len(character.encode()))
    async with pool("{{ messages[0].content }}") as renderers:
        assert await renderers.render([ChatMessage("user", content)]) == content
        assert renderers.num_killed == 0


@pytest.mark.parametrize("endless", [LOOP, "{{ 10 ** (10 ** (8 + messages | length)) }}"])
async def test_an_endless_template_is_killed_while_others_are_served(endless: str) -> None:
    template = ON_DEMAND.replace(LOOP, endless)
    async with pool(template, size=2, timeout=0.5) as renderers:
        stuck = asyncio.create_task(renderers.render([ChatMessage("user", "loop")]))
        for _ in range(3):  # in half a second, beside other tests
            assert await renderers.render(HELLO) == "hello"
        assert not stuck.done()
        with pytest.raises(RequestError, match=r"chat takes more than .* to render"):
            await asyncio.wait_for(stuck, 20)
        assert renderers.num_killed == 1
        async with asyncio.timeout(10):
            while len(renderers._children) < 2 or renderers._replacing:
                await asyncio.sleep(0.02)
        assert await asyncio.gather(*(renderers.render(HELLO) for _ in range(8))) == ["hello"] * 8


async def test_waiting_for_a_renderer_is_bounded() -> None:
    async with pool(ON_DEMAND, timeout=0.3) as renderers:
        stuck = asyncio.create_task(renderers.render([ChatMessage("user", "loop")]))
        await asyncio.sleep(0)
        renderers.patience = renderers.timeout = 0.1
        with pytest.raises(RequestError) as caught:
            await renderers.render(HELLO)
        assert caught.value.code is RejectCode.UNAVAILABLE
        assert caught.value.retry_after_ms > 0
        with pytest.raises(RequestError):
            await stuck


async def test_a_child_that_dies_is_replaced() -> None:
    async with pool(ON_DEMAND) as renderers:
        (child,) = renderers._children
        child.kill()
        with pytest.raises(RequestError):
            await renderers.render(HELLO)
        renderers.patience = renderers.timeout = 10
        assert await renderers.render(HELLO) == "hello"


async def test_no_child_outlives_the_pool() -> None:
    async with pool(ON_DEMAND, size=2) as renderers:
        children = list(renderers._children)
    for child in children:
        assert child.returncode is not None
        with pytest.raises(ProcessLookupError):
            os.kill(child.pid, 0)
