"""A whole model with Triton's kernels: the tokens are those of the CPU's own."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.description.reading import read_config
from engine.execution.runner import ModelRunner
from engine.loading import load as loading
from engine.loading import reading
from engine.loading.backend import Backend, choose_backend
from engine.loading.graphs import CudaRecorder, DirectRecorder, GraphedDecoder, Recorder, StepGraph, step_sizes
from engine.modeling.batch import StepBatch
from engine.modeling.torch_decoder.decoder import Decoder
from engine.weights.source import open_weights
from kernels.interface import AttentionShape
from kernels.ops.linears.codes import quantise_to_codes
from kernels.ops.linears.linear_fp8 import FP8
from kernels.provider import has_triton, quantising, triton_kernels
from services.scheduler.state.policy import Policy
from shared.config import Settings
from shared.requests.sampling import SamplingParams
from shared.text.model_source import resolve_model_dir
from tests.engine.checkpoints import random_prompt, save_checkpoint
from tests.engine.driver import Driver
from tests.integration.engine import Engine, ask, token_ids

if not has_triton():
    pytest.skip("triton is not installed", allow_module_level=True)

from kernels.triton.launch import INTERPRETED

if not (INTERPRETED or torch.cuda.is_available()):
    pytest.skip("no GPU, and triton was imported without TRITON_INTERPRET=1", allow_module_level=True)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.*")
ROOT = Path(__file__).resolve().parents[3]
FIXTURES = ROOT / "tests" / "engine" / "weights" / "quantised" / "fixtures"
BUNDLED, DRAFT = ROOT / "models" / "pageant-stories", ROOT / "models" / "pageant-stories-draft"
SAMPLED = SamplingParams(temperature=0.9, top_p=0.95, top_k=50)


def make_runner(
    model: Path, *, triton: bool, graphs: bool = False, windows: bool = False, **changes: Any
) -> ModelRunner:
    """In float32, where providers agree token for token; graphs are run, not captured, where there is no GPU.
    `windows`: layers that see one have blocks of their own."""
    settings = Settings.of(
        model=str(model), kernels="torch", device="cpu", dtype="float32", num_blocks=64, max_num_seqs=8, **changes
    )
    directory = resolve_model_dir(settings.engine.model)
    config = read_config(directory)
    source = open_weights(settings.engine.load_format, directory, config)
    backend: Backend = choose_backend(settings, config, source.dtype, quantised=source.quantisation is not None)
    if triton:
        formats = backend.formats
        kernels = quantising(
            triton_kernels(AttentionShape(config.head_shapes)),
            formats.weights if formats.quantised else None,
            formats.group,
            quantised_head=formats.quantised_head,
        )
        backend = replace(backend, kernels=kernels, device=DEVICE)
    built = reading.build(backend, config, source, config.max_position_embeddings)
    if graphs:
        assert isinstance(built, Decoder)
        built = GraphedDecoder(built, recorder(), max_tokens=12, longest=4)
    seen = config.windows(config.max_position_embeddings) if windows else ()
    plan = loading.plan_pool(settings, built, config.max_position_embeddings, seen)
    return loading.make_runner(settings, loading.assemble(settings, built, backend, plan))


def recorder() -> Recorder:
    """On a card the graphs themselves."""
    return CudaRecorder() if DEVICE.type == "cuda" else DirectRecorder()


def generate(runner: ModelRunner, num_tokens: int) -> list[list[int]]:
    """A prompt in two chunks beside another that decodes already, one of them sampling."""
    driver = Driver(runner)
    first = driver.add(0, random_prompt(21, seed=1))
    second = driver.add(3, random_prompt(9, seed=2), SAMPLED, seed=7)
    driver.step({3: 9})
    driver.step({0: 12, 3: 1})
    driver.step({0: 9, 3: 1})
    for _ in range(num_tokens):
        driver.step({0: 1, 3: 1})
    return [first.output, second.output]


@pytest.mark.parametrize(("model", "kv_cache_dtype"), [(BUNDLED, "auto"), (DRAFT, "int8")])
def test_the_bundled_models(model: Path, kv_cache_dtype: str) -> None:
    wanted = generate(make_runner(model, triton=False, kv_cache_dtype=kv_cache_dtype), 1)
    assert generate(make_runner(model, triton=True, kv_cache_dtype=kv_cache_dtype), 1) == wanted
    assert len(set(wanted[0])) > 1


FAMILIES = (
    "qwen3",
    "qwen2-window",
    "gpt2",
    "gemma2",
    "gemma4",
    "olmo2",
    "qwen2-moe",
    "gpt-oss",
    "deepseek-v2",
    "deepseek-v3-halves",
    "qwen3.5",
)  # each kind of layer


@pytest.mark.parametrize("variant", FAMILIES)
def test_families(variant: str, tmp_path: Path) -> None:
    save_checkpoint(tmp_path, variant)
    wanted = generate(make_runner(tmp_path, triton=False), 2)
    assert generate(make_runner(tmp_path, triton=True), 2) == wanted


def test_weights_that_a_checkpoint_has_turned_are_laid_out_in_rows(tmp_path: Path) -> None:
    """GPT-2's; kernels would read others.  A CPU copies its weights in another way, so this is for one that is not."""
    save_checkpoint(tmp_path, "gpt2")
    settings, config = Settings.of(model=str(tmp_path), kernels="torch", device="cpu"), read_config(tmp_path)
    source = open_weights(settings.engine.load_format, tmp_path, config)
    backend = replace(choose_backend(settings, config, source.dtype), device=torch.device("meta"))
    backend = replace(backend, kernels=triton_kernels(AttentionShape(config.head_shapes)))
    built = reading.build(backend, config, source, config.max_position_embeddings)
    assert isinstance(built, Decoder)
    for layer in built._layers:
        assert layer.dense is not None
        for projection in (layer.qkv, layer.output, layer.dense.gate_up, layer.dense.down):
            assert projection.weight.weight.is_contiguous()


def test_graphs_pad_and_change_nothing(tmp_path: Path) -> None:
    """Decodes and short entries go through the tensors that graphs read; the prompt's chunks are too long for them."""
    save_checkpoint(tmp_path, "mistral-window")
    runner = make_runner(tmp_path, triton=True, graphs=True)
    model = runner._model
    assert isinstance(model, GraphedDecoder)
    replays = 0
    forward = StepGraph.fill

    def count(self: StepGraph, batch: StepBatch) -> None:
        nonlocal replays
        replays += 1
        forward(self, batch)

    with patch.object(StepGraph, "fill", count):
        found = generate(runner, 2)
    assert replays == 2  # the prompts' chunks are longer than what graphs are made for
    assert found == generate(make_runner(tmp_path, triton=False), 2)


@pytest.mark.skipif(DEVICE.type == "cuda", reason="memory that was not written is marked for launches on the CPU alone")
@pytest.mark.parametrize("variant", ["mistral-window", "llama-tied"])
def test_what_pads_a_graph_holds_zeros(variant: str, tmp_path: Path) -> None:
    """Not what its memory held before: a number that grows from layer to layer, or none at all."""
    save_checkpoint(tmp_path, variant)
    runner = make_runner(tmp_path, triton=True, graphs=True)
    driver = Driver(runner)
    driver.add(0, random_prompt(21, seed=1))
    driver.step({0: 21})
    seen = []
    run = StepGraph.fill

    def note(self: StepGraph, batch: StepBatch) -> None:
        run(self, batch)
        seen.append((self._size.num_tokens, self.run()))

    torch.use_deterministic_algorithms(True)  # and whatever is made empty is full of NaN
    try:
        with patch.object(StepGraph, "fill", note):
            driver.step({0: 3}, {0: [5, 6]})
    finally:
        torch.use_deterministic_algorithms(False)
    assert [size for size, _ in seen] == [4]
    assert all(bool(hidden.isfinite().all()) for _, hidden in seen)


def test_verification_through_graphs(tmp_path: Path) -> None:
    """What was accepted is settled where the tokens are; the plan after it is made from the answer alone."""
    save_checkpoint(tmp_path, "llama-tied")
    wanted = generate(make_runner(tmp_path, triton=False), 12)
    runner = make_runner(tmp_path, triton=True, graphs=True)
    driver = Driver(runner)
    first = driver.add(0, random_prompt(21, seed=1))
    second = driver.add(3, random_prompt(9, seed=2), SAMPLED, seed=7)
    driver.step({0: 21, 3: 9})
    accepted = []
    for right in (3, 2, 0, 3):
        place = len(first.output)
        proposed = [*wanted[0][place : place + right], 7, 7, 7][:3]
        result = driver.step({0: 1 + len(proposed), 3: 1}, {0: proposed})
        accepted.append(result.num_sampled[0] - 1)
    assert accepted == [3, 2, 0, 3]
    assert first.output == wanted[0][: len(first.output)] and second.output == wanted[1][: len(second.output)]


@pytest.mark.parametrize("graphs", [False, True])
def test_layers_with_windows_read_blocks_of_their_own(graphs: bool, tmp_path: Path) -> None:
    """Planned by a scheduler, which gives up the blocks before a window of 11 tokens."""
    save_checkpoint(tmp_path, "gemma2", further={"num_hidden_layers": 2})
    asked = [ask(random_prompt(length, seed=length), max_tokens=12) for length in (30, 5)]
    found = []
    for windows in (False, True):
        engine = Engine(Policy(max_num_batched_tokens=24), workers=0)
        runner = make_runner(tmp_path, triton=True, graphs=graphs, windows=windows)
        assert bool(runner.capacity.sliding) is windows
        engine.runners["w0"] = runner
        engine.core.add_worker("w0", 1, runner.capacity)
        found.append(token_ids(engine.generate(asked)))
        replays = isinstance(runner._model, GraphedDecoder)
        assert replays is graphs
    assert found[0] == found[1]
    assert any(sum(part.num_left_blocks) for _, plan in engine.plans for part in plan.sliding)


@pytest.mark.parametrize("quantization", ["int8", "fp8"])
def test_weights_that_meet_activations_in_8_bits(quantization: str, tmp_path: Path) -> None:
    """Rounding carries a last bit's difference on: the same tokens for as long as no step moves."""
    save_checkpoint(tmp_path, "llama-tied")
    wanted = generate(make_runner(tmp_path, triton=False, quantization=quantization), 1)
    assert generate(make_runner(tmp_path, triton=True, quantization=quantization), 1) == wanted


@pytest.mark.parametrize("variant", ["llama-tied", "qwen2-moe"])
def test_4_bits_made_at_load(variant: str, tmp_path: Path) -> None:
    """As if the checkpoint had what they stand for."""
    given, rounded = tmp_path / "given", tmp_path / "rounded"
    save_checkpoint(given, variant)
    shutil.copytree(given, rounded)
    tensors = load_file(given / "model.safetensors")
    for name, weight in tensors.items():
        if "_proj." in name and weight.dim() == 2:
            tensors[name] = quantise_to_codes(weight, 32).dequantised()
    save_file(tensors, rounded / "model.safetensors", metadata={"format": "pt"})
    runner = make_runner(given, triton=True, quantization="int4", quantization_group=32, quantization_head="none")
    assert isinstance(runner._model, Decoder)
    layer, found = runner._model._layers[-1], generate(runner, 2)
    assert layer.qkv.weight.decoded is not None
    assert layer.mixture is None or (layer.mixture.gate_up.decoded and layer.mixture.down.decoded)
    assert found == generate(make_runner(rounded, triton=False), 2)


def test_e4m3_of_a_checkpoint_meets_e4m3() -> None:
    """With its own codes and scales; a prompt's tokens are about as likely as with activations that nothing rounds."""
    directory = FIXTURES / "ct-fp8-block"
    prompt = random_prompt(21, seed=1, vocab_size=read_config(directory).vocab_size)
    scored, found = SamplingParams(temperature=0.0, prompt_logprobs=0), []
    stored = load_file(directory / "model.safetensors")["model.layers.0.self_attn.o_proj.weight"]
    settings: dict[str, Any] = {"quantization": "fp8", "quantization_head": "none"}
    for triton, given in ((False, settings), (True, settings), (False, {})):
        runner = make_runner(directory, triton=triton, **given)
        assert isinstance(runner._model, Decoder)
        held = runner._model._layers[0].output.weight.weight
        assert not given or torch.equal(held.cpu().view(torch.uint8), stored.view(torch.uint8))
        assert (held.dtype == FP8) is bool(given)
        driver = Driver(runner)
        row = driver.add(0, prompt, scored)
        driver.generate(1)
        found.append(torch.tensor([one.logprobs[0] for one in row.prompt_logprobs]))
    reference, own, exact = found
    off = (own - exact).abs().mean()
    assert 1e-3 < float(off) < 0.3  # it was rounded
    assert float((own - reference).abs().mean()) < float(off)  # which carries a last bit's difference on


@pytest.mark.parametrize("fixture", ["ct-w4a16-asymmetric", "ct-fp8-block"])
def test_codes_of_a_checkpoint(fixture: str) -> None:
    """Decoded while they are multiplied, where the reference dequantises them at load."""
    directory = FIXTURES / fixture
    prompt = random_prompt(21, seed=1, vocab_size=read_config(directory).vocab_size)
    scored, found = SamplingParams(temperature=0.0, prompt_logprobs=0), []
    for triton in (False, True):
        driver = Driver(make_runner(directory, triton=triton))
        row = driver.add(0, prompt, scored)
        driver.generate(2)
        found.append((row.output, torch.tensor([one.logprobs[0] for one in row.prompt_logprobs])))
    (wanted, exact), (output, logprobs) = found
    assert output == wanted and float((logprobs - exact).abs().max()) < 1e-4


def test_sizes_of_graphs() -> None:
    assert step_sizes(1) == [1]
    assert step_sizes(6) == [1, 2, 4, 6]
    assert step_sizes(100)[:5] == [1, 2, 4, 8, 16] and step_sizes(100)[-3:] == [80, 96, 100]
