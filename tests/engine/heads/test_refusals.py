"""What is wrong with a head is one line at start, which says what it should be; the doctor says the same."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.description.reading import read_config
from engine.loading.heads import find_head
from services.cli.checks.settings import examine_model
from shared.config import Settings
from shared.errors import ModelError
from tests.engine.checkpoints import VOCAB, save_checkpoint
from tests.engine.heads.mtp import write_mtp
from tests.engine.heads.oracle import write_eagle1, write_eagle3

CAPTURES = (0, 2)
Change = Callable[[Path], None]


def config(**changes: Any) -> Change:
    def apply(head: Path) -> None:
        path = head / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return apply


def tensor(name: str, made: torch.Tensor | None) -> Change:
    def apply(head: Path) -> None:
        tensors = load_file(head / "model.safetensors")
        del tensors[name]
        save_file(tensors if made is None else {**tensors, name: made}, head / "model.safetensors")

    return apply


WRONG: dict[str, tuple[Change, str]] = {
    "layer": (config(eagle_aux_hidden_state_layer_ids=[0, 3]), "layers in 0..2, got [0, 3]"),
    "layer-left": (
        config(eagle_aux_hidden_state_layer_ids=None, eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 2]}),
        "layers in 0..2, got [1, 3]",
    ),
    "few-layers": (config(eagle_aux_hidden_state_layer_ids=None), "layers in 0..2, got [2, 1, 0]"),
    "hidden": (config(target_hidden_size=96), "target_hidden_size is 96; the model's hidden_size is 48"),
    "vocabulary": (config(vocab_size=999), f"vocab_size is 999; the model's is {VOCAB}"),
    "drafts": (config(draft_vocab_size=999), f"draft_vocab_size is 999; the model has {VOCAB} tokens"),
    "absent": (tensor("fc.weight", None), "fc.weight (1 tensors) of an EAGLE-3 head are missing"),
    "shape": (tensor("fc.weight", torch.zeros(48, 48)), "tensor fc.weight has shape [48, 48], expected [48, 96]"),
    "codes": (tensor("fc.weight", torch.zeros(48, 96, dtype=torch.int8)), "is in I8; draft heads are read in 16"),
    "offsets": (tensor("d2t", None), "and there is no d2t"),
    "surplus": (config(norm_before_fc=False), "input_norm.weight (1 tensors) are not EAGLE-3's"),
    "kind": (config(speculators_model_type="medusa"), "speculators_model_type 'medusa' is not supported"),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    save_checkpoint(directory, "llama-mha")
    (directory / "tokenizer.json").write_text("{}")
    return directory


def find(model: Path, draft: str) -> None:
    """As a worker does before it reads a weight."""
    find_head(Settings.of(model=str(model), draft=draft), model, read_config(model))


def said(settings: Settings) -> list[str]:
    return [f"{one.verdict}: {one.text}" for one in examine_model(settings) if one.subject == "draft"]


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_head_is_one_line(name: str, model: Path, tmp_path: Path) -> None:
    write_eagle3(tmp_path, 48, VOCAB, CAPTURES, drafted=60, norm_before_fc=True)
    draft = f"eagle:{tmp_path}"
    settings = Settings.of(model=str(model), draft=draft)
    assert said(settings)[0].startswith(f"ok: {tmp_path}: EAGLE-3 head of 0.0 M weights, which reads")
    change, text = WRONG[name]
    change(tmp_path)
    with pytest.raises(ModelError) as caught:
        find(model, draft)
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)
    assert said(settings) == [f"wrong: {caught.value}"]


def test_offsets_to_no_token_are_refused(model: Path, tmp_path: Path) -> None:
    write_eagle3(tmp_path, 48, VOCAB, CAPTURES, drafted=60)
    tensor("d2t", torch.full((60,), VOCAB))(tmp_path)
    with pytest.raises(ModelError, match=f"d2t names a token outside the model's vocabulary of {VOCAB}"):
        find(model, f"eagle:{tmp_path}")


def test_a_head_of_another_size_is_refused(model: Path, tmp_path: Path) -> None:
    write_eagle1(tmp_path, 64, VOCAB)
    with pytest.raises(ModelError, match="hidden_size is 64; the model's is 48"):
        find(model, f"eagle:{tmp_path}")


def test_a_checkpoint_says_what_it_brings(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="draft=mtp: LlamaForCausalLM has no layer to draft with"):
        find(model, "mtp")
    assert said(Settings.of(model=str(model))) == []
    write_mtp(tmp_path, "qwen3.5", "torch")
    (tmp_path / "tokenizer.json").write_text("{}")
    assert said(Settings.of(model=str(tmp_path))) == ["note: none; the checkpoint has a layer that drafts: --draft mtp"]
    assert said(Settings.of(model=str(tmp_path), draft="mtp"))[0].startswith(f"ok: {tmp_path}: MTP head of")
    tensor("mtp.fc.weight", None)(tmp_path)
    assert said(Settings.of(model=str(tmp_path))) == []
    with pytest.raises(ModelError, match=r"mtp\.fc\.weight \(1 tensors\) of an MTP head are missing"):
        find(tmp_path, "mtp")
