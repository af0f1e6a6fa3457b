"""Ranks that compute with torch: what they gather gives the bits of one process, what they add the same tokens.

NCCL is tried where there are two GPUs, and where there is one, which two ranks share then.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import torch

from engine.description.ranks import Place
from engine.description.reading import read_config
from engine.loading.backend import choose_backend
from engine.loading.load import load_runner
from engine.loading.torch_ranks import MEETING, build_torch_part, distributed, make_backend, meet
from engine.modeling.batch import StepBatch
from engine.modeling.torch_decoder.dual_batch import DualBatch
from engine.weights.source import open_weights
from services.worker.groups import rank_processes
from services.worker.groups.rank_processes import link_pair
from shared.config import Settings
from shared.errors import ConfigError, FatalError
from shared.requests.sampling import SamplingParams
from tests.engine.checkpoints import save_checkpoint
from tests.engine.driver import GREEDY, Driver
from tests.engine.modeling.ranks.test_ranks import (
    FIXTURES,
    MODEL,
    Said,
    assert_frozen_rank_ends_the_group,
    assert_killed_rank_ends_the_group,
    say,
    until_failed,
)
from tests.engine.ranks import linked, ranked

# 3 KV heads; the last rank of 3 has 16 of 112 inner features, and 19 of the vocabulary's 211 tokens are not in a panel.
WIDE = {"hidden_size": 144, "num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 112}
SIZES = {"num_key_value_heads": 2, "num_global_key_value_heads": 2, "hidden_size": 72, "intermediate_size": 90}
SAMPLED = SamplingParams(temperature=1.0)
NEAR = 2e-3  # of log-probabilities, where partial sums are added
DUAL = {"enable_dbo": True, "dbo_token_threshold": 2}
WAYS: list[dict[str, Any]] = [{}, {"tensor_parallel_reduce": True}, DUAL]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Forks have none of this process's threads."""
    torch.set_num_threads(1)


def settings_of(directory: Path, **changes: Any) -> Settings:
    options: dict[str, Any] = {"device": "cpu", "kernels": "torch", "num_blocks": 96, "num_threads": 1}
    return Settings.of(model=str(directory), **(options | changes))


def assert_same(settings: Settings, *ranks: int, **changes: Any) -> None:
    """Of ranks, whose settings have these changes, and one process."""
    alone = load_runner(settings, has_windows=False)
    wanted = say(alone)
    for count in ranks:
        own = settings.replace(tensor_parallel_size=count, **changes)
        with ranked(own, count, has_windows=False) as (runner, _):
            assert runner.fingerprint == alone.fingerprint
            assert say(runner) == wanted, f"{count} ranks"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_ranks_say_what_one_process_says(dtype: str) -> None:
    assert_same(settings_of(MODEL, dtype=dtype), 2, 3)


def test_heads_that_do_not_divide_by_the_ranks(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "llama-bias", further=WIDE)
    assert_same(settings_of(tmp_path, dtype="float32", kv_cache_dtype="int8"), 2, 3)


@pytest.mark.parametrize("variant", ["gemma2", "gpt2-untied", "phi3-partial", "qwen3-yarn", "gemma4", "mistral-window"])
def test_every_kind_of_dense_model(variant: str, tmp_path: Path) -> None:
    save_checkpoint(tmp_path, variant, further=SIZES | ({"hidden_size": 80} if "phi3" in variant else {}))
    assert_same(settings_of(tmp_path, dtype="float32"), 2)


@pytest.mark.parametrize("changes", [{"quantization": "int8"}, {"quantization": "int4"}], ids=str)
def test_weights_that_are_quantised_at_load(changes: dict[str, Any]) -> None:
    """The embedding is rows of the quantised head."""
    assert_same(settings_of(MODEL, **changes), 2)


@pytest.mark.parametrize("fixture", ["gptq-4-asymmetric", "ct-fp8-dynamic"])
def test_codes_of_a_checkpoint(fixture: str) -> None:
    assert_same(settings_of(FIXTURES / fixture), 2)


@pytest.mark.parametrize("ranks", [2, 3])
def test_halves_of_a_step_that_take_turns_change_no_bit(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    run, counts = DualBatch.run, list[int]()

    def counted(self: DualBatch, *both: Any) -> Any:
        counts.append(1)
        return run(self, *both)

    monkeypatch.setattr(DualBatch, "run", counted)
    assert_same(settings_of(MODEL, dtype="float32"), ranks, **DUAL)
    assert len(counts) > 8


def test_ranks_of_several_hosts_say_what_one_process_says() -> None:
    """They share no memory, and meet at the address by which they have joined."""
    settings = settings_of(MODEL, dtype="float32")
    wanted = say(load_runner(settings, has_windows=False))
    with linked(settings, 3, has_windows=False) as (runner, group, others):
        assert say(runner) == wanted
        os.kill(others[1].pid, signal.SIGKILL)
        driver = Driver(runner)
        driver.add(0, [5, 6, 7])
        with pytest.raises(FatalError, match="a rank has ended"):
            driver.generate(400)
        until_failed(group)
        assert group.failure.startswith("rank 2 of the group has ended")


def test_softcaps_pass_the_whole_vocabulary(tmp_path: Path) -> None:
    """Greedy tokens are chosen behind the cap, where one process chooses them."""
    save_checkpoint(tmp_path, "gemma2", further=SIZES)
    assert_same(settings_of(tmp_path, dtype="float32"), 2, **DUAL)


def logprobs_of(said: Said) -> list[float]:
    """Of every token that was sampled, or stands in a prompt."""
    both = [each for _, output, prompt in said for each in (output, prompt)]
    return [one.logprobs[0] for each in both for one in each if one is not None]


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("variant", ["bundled", "llama-bias"])
@pytest.mark.parametrize("changes", [{}, DUAL], ids=["whole", "halves"])
def test_partial_sums_that_are_added_give_the_same_tokens(
    ranks: int, variant: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    """Biases are added once.  It is a numeric class of its own."""
    model = MODEL
    if variant != "bundled":
        save_checkpoint(tmp_path, variant, further=WIDE)
        model = tmp_path
    settings = settings_of(model, dtype="float32")
    alone = load_runner(settings, has_windows=False)
    wanted = say(alone)
    own = settings.replace(tensor_parallel_size=ranks, tensor_parallel_reduce=True, **changes)
    with ranked(own, ranks, has_windows=False) as (runner, _):
        found = say(runner)
        assert alone.fingerprint is not None and runner.fingerprint is not None
        assert runner.fingerprint.numeric_class == f"{alone.fingerprint.numeric_class}, reduced by {ranks} ranks"
    assert [tokens for tokens, *_ in found] == [tokens for tokens, *_ in wanted]
    known = logprobs_of(wanted)
    assert len(known) > 60
    assert logprobs_of(found) == pytest.approx(known, abs=NEAR)


def test_kernels_whose_columns_depend_on_others_are_a_class_of_their_own() -> None:
    settings = settings_of(MODEL, dtype="float32", batch_invariant=False)
    alone = load_runner(settings, has_windows=False)
    with ranked(settings.replace(tensor_parallel_size=2), 2, has_windows=False) as (runner, _):
        assert alone.fingerprint is not None and runner.fingerprint is not None
        assert runner.fingerprint.numeric_class == f"{alone.fingerprint.numeric_class}, 2 ranks"


def test_a_rank_that_ends_ends_the_group_at_once() -> None:
    assert_killed_rank_ends_the_group(settings_of(MODEL))


@pytest.mark.parametrize("leads", [True, False])
def test_a_rank_that_ends_before_all_have_met_is_not_waited_for(leads: bool) -> None:
    """torch itself would wait for a minute."""
    pairs = [link_pair() for _ in range(2 if leads else 1)]
    place, links = Place(0 if leads else 1, 3), [own.fileno() for own, _ in pairs]
    store = distributed.TCPStore("127.0.0.1", 0, 3, True, MEETING, wait_for_workers=False)
    begin = time.monotonic()
    threading.Timer(0.3, pairs[-1][1].close).start()
    with pytest.raises(FatalError, match="a rank has ended before all have met"):
        meet(links, partial(make_backend, store, place, torch.device("cpu"), "127.0.0.1"))
    assert 0.3 < time.monotonic() - begin < 1.0
    for pair in pairs:
        for end in pair:
            end.close()


def test_ranks_that_meet_are_connected_and_errors_are_those_of_the_meeting() -> None:
    link, other = link_pair()
    store = distributed.TCPStore("127.0.0.1", 0, 1, True, MEETING, wait_for_workers=False)
    backend = meet([link.fileno()], partial(make_backend, store, Place(0, 1), torch.device("cpu"), "127.0.0.1"))
    assert backend.name() == "gloo"

    def broken() -> NoReturn:
        raise RuntimeError("no address")

    with pytest.raises(RuntimeError, match="no address"):
        meet([link.fileno()], broken)
    link.close()
    other.close()


def test_a_frozen_rank_ends_the_group_too() -> None:
    assert_frozen_rank_ends_the_group(settings_of(MODEL))


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_ranks_that_read_different_steps_give_no_token(params: SamplingParams) -> None:
    with ranked(settings_of(MODEL), 3) as (runner, group):
        driver = Driver(runner)
        driver.add(0, [5, 6, 7], params)
        driver.generate(3)
        assert group.model is not None
        group.model.forget_orders()
        with pytest.raises(FatalError, match="its ranks read different steps"):
            driver.generate(6)
        assert len(driver.live[0].output) == 3


@pytest.mark.parametrize("fixture", ["int8", "codes"])
def test_quantised_weights_are_not_added_up(fixture: str) -> None:
    model, changes = (MODEL, {"quantization": "int8"}) if fixture == "int8" else (FIXTURES / "gptq-4-asymmetric", {})
    settings = settings_of(model, tensor_parallel_reduce=True, tensor_parallel_size=2, **changes)
    if fixture == "codes":  # torch dequantises these unless int4 is asked for
        settings = settings.replace(quantization="int4")
    with (
        pytest.raises(ConfigError, match=r"^tensor_parallel_reduce is for weights in 16 or 32 bits"),
        ranked(settings, 2),
    ):
        raise AssertionError("it has loaded")


def test_mixtures_are_refused_in_a_line(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "qwen3-moe", further={"moe_intermediate_size": 64})
    with (
        pytest.raises(ConfigError, match="mixtures of experts are cut into ranks on native kernels alone"),
        ranked(settings_of(tmp_path), 2),
    ):
        raise AssertionError("it has loaded")


@torch.inference_mode()
def test_a_rank_alone_computes_with_zeros_for_the_others() -> None:
    """As the profile of a GPU's memory does, before ranks have met."""
    settings = settings_of(MODEL, dtype="float32", tensor_parallel_size=2)
    spec, batch = read_config(MODEL), prompt_of(20)
    source = open_weights("auto", MODEL, spec)
    backend = choose_backend(settings, spec, source.dtype)
    model = build_torch_part(settings.engine, Place(1, 2), backend, spec, source, max_positions=64, reads_all=False)
    model.allocate(4, 8)
    hidden = model.forward(batch)
    assert hidden.shape == (20, spec.hidden_size) and bool(hidden.isfinite().all())
    assert model.logits(hidden).shape == (20, spec.vocab_size)
    assert model.greedy(hidden).shape == (20,)


def prompt_of(length: int) -> StepBatch:
    one = np.zeros(1, np.int64)
    tokens = torch.arange(length)[None]
    return StepBatch(one, one, one + length, one + length, tokens, np.arange(4)[None], block_size=8)


def assert_ranks_on_gpus_say_the_same(**changes: Any) -> None:
    """Processes of their own: a fork has no GPU."""
    from scripts.bench.ranks.ranks import grouped

    settings = settings_of(MODEL, device="cuda", kernels="auto", dtype="float32")
    wanted = [tokens for tokens, *_ in say(load_runner(settings, has_windows=False))]
    with grouped(settings.replace(tensor_parallel_size=2, **changes), 2, "tensor_parallel_size") as (runner, _):
        assert [tokens for tokens, *_ in say(runner)] == wanted


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("changes", WAYS, ids=str)
def test_ranks_on_gpus_say_what_one_says(changes: dict[str, Any]) -> None:
    assert_ranks_on_gpus_say_the_same(**changes)


@pytest.mark.skipif(torch.cuda.device_count() != 1, reason="needs one GPU, which two ranks share")
@pytest.mark.parametrize("changes", WAYS, ids=str)
def test_ranks_that_share_a_gpu_say_what_one_says(changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL wants a GPU for each rank of a host.  Each rank says that it is on a host of its own, so that what it sends
    passes sockets, and both compute on the same card in turns."""
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("NCCL_HOSTID", "host of rank 0")
    monkeypatch.setattr(rank_processes, "own_gpu", lambda rank, environment: {"NCCL_HOSTID": f"host of rank {rank}"})
    torch.zeros(1, device="cuda")  # torch looks at the GPUs that there are
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert_ranks_on_gpus_say_the_same(**changes)
