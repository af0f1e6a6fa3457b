"""The longest beginning that a block shares with wanted tokens, against all blocks looked at one by one."""

from __future__ import annotations

import random
from itertools import takewhile

from services.scheduler.blocks.contents import BlockContents, num_alike, pack

SIZE = 4


def alike(one: list[int], other: list[int]) -> int:
    return len(list(takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))))


def test_tokens_are_compared_whole() -> None:
    assert num_alike(pack([1, 0x01020304]), pack([1, 0x01020305])) == 1
    assert num_alike(pack([1, 2]), pack([1, 2, 3])) == 2
    assert num_alike(pack([]), pack([1])) == 0
    assert num_alike(pack([1 << 31]), pack([2 << 24])) == 0


def test_random_blocks() -> None:
    r = random.Random(5)
    contents = BlockContents(SIZE)
    blocks: dict[bytes, tuple[bytes, list[int]]] = {}
    num_found = 0
    for number in range(4000):
        parent = r.choice([b"root", b"other", *list(blocks)[:3]])
        kind = r.random()
        if kind < 0.4:
            name, tokens = f"{number}".encode(), [r.choice([0, 1, 255, 256, 1 << 17]) for _ in range(SIZE)]
            if (parent, tokens) not in blocks.values():
                contents.learn(name, parent, tokens)
                blocks[name] = parent, tokens
        elif kind < 0.6 and blocks:
            name = r.choice(list(blocks))
            contents.forget(name)
            del blocks[name]
        else:
            wanted = [r.choice([0, 1, 255, 256, 1 << 17]) for _ in range(r.randint(0, SIZE))]
            found, count = contents.longest(parent, wanted)
            assert count == max(
                (alike(tokens, wanted) for above, tokens in blocks.values() if above == parent), default=0
            )
            assert count == 0 or (blocks[found][0] == parent and alike(blocks[found][1], wanted) == count)
            num_found += count > 0
        assert len(contents) == len(blocks)
    assert num_found > 500
    for name in blocks:
        contents.forget(name)
    assert not (contents._followers or contents._names), "what is forgotten leaves nothing behind"
    contents.forget(b"never known")
