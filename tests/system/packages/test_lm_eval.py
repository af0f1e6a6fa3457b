"""lm-eval through the HTTP API: the same figures as from its own transformers backend, on the same checkpoint.

scripts/prove_lm_eval installs what it needs and runs it; without that it skips.  Both sides compute in float32.  They
may differ by what another order of sums makes: an example at which two choices, or two words, are equally likely (at
most one in a hundred), and the fifth digit of a likelihood.  Neither puts a BOS before a prompt, save where there
is none: with add_bos_token the two backends' rolling likelihoods count other tokens, whatever serves them.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.system.harness import MODEL, troupe
from tests.system.packages.lm_eval_tasks import TASKS, write_tasks

PYTHON = os.environ.get("PAGEANT_LM_EVAL", "")
COUNT = int(os.environ.get("PAGEANT_LM_EVAL_EXAMPLES", "100"))
FIGURES = (
    ("stories_next", "acc,none", 0.01),
    ("stories_next", "acc_norm,none", 0.01),
    ("stories_word", "exact_match,first-word", 0.01),
    ("stories_bits", "bits_per_byte,none", 1e-4),
    ("stories_bits", "word_perplexity,none", 0.05),
)

pytestmark = pytest.mark.skipif(
    not Path(PYTHON).is_file(), reason="needs lm-eval, which scripts/prove_lm_eval installs (PAGEANT_LM_EVAL)"
)


def evaluate(tasks: Path, output: Path, backend: str, /, **arguments: object) -> dict[str, Any]:
    """lm-eval's results by task.  It finds no hub."""
    given = ",".join(f"{name}={value}" for name, value in arguments.items())
    command = [
        PYTHON, "-m", "lm_eval", "run", "--model", backend, "--model_args", given, "--tasks", *TASKS,
        "--include_path", str(tasks), "--output_path", str(output), "--device", "cpu", "--log_samples",
    ]  # fmt: skip
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tasks / "cache")}
    done = subprocess.run(command, env=os.environ | offline, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()[-4000:]
    (found,) = output.rglob("results_*.json")
    results: dict[str, Any] = json.loads(found.read_text())["results"]
    return results


def texts(output: Path) -> dict[int, str]:
    """What was generated, by example."""
    (found,) = output.rglob("samples_stories_word_*.jsonl")
    samples = [json.loads(line) for line in found.read_text().splitlines()]
    return {sample["doc_id"]: sample["resps"][0][0] for sample in samples}


def test_the_figures_are_those_of_transformers(tmp_path: Path, data_dir: Path) -> None:
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    write_tasks(data_dir / "text" / "tinystories-cased.txt", tasks, COUNT)
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    exact = ("--dtype", "float32", "--kv-cache-dtype", "float32", "--num-threads", "1")
    with troupe(tmp_path, *exact) as running:
        through_http = evaluate(
            tasks, ours, "local-completions", model=MODEL.name, base_url=f"{running.url}/v1/completions",
            tokenizer=MODEL, tokenizer_backend="huggingface", add_bos_token=False, num_concurrent=8, max_length=1023,
        )  # fmt: skip
        assert running.settled_load().num_finished >= 4 * COUNT
    by_transformers = evaluate(tasks, theirs, "hf", pretrained=MODEL, dtype="float32", add_bos_token=False)
    for task, metric, tolerance in FIGURES:
        found, wanted = through_http[task][metric], by_transformers[task][metric]
        print(f"{task:14} {metric:24} {found:10.5f} through HTTP {wanted:10.5f} by transformers")
        assert found == pytest.approx(wanted, abs=tolerance), (task, metric)
    assert 0.3 < through_http["stories_next"]["acc_norm,none"] < 1, "a task that says something: chance is a quarter"
    mine, other = texts(ours), texts(theirs)
    assert sum(mine[place] != other[place] for place in other) <= COUNT // 100
