"""lm-eval, local-completions with tasks of our own: choices, perplexity, generation; against the simulator."""

from __future__ import annotations

import json
import math
import sys
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

import lm_eval  # type: ignore[import-not-found]
from lm_eval.tasks import TaskManager  # type: ignore[import-not-found]

URLS: dict[str, str] = json.loads(sys.argv[1])
URL = URLS["simulator"]

CHOICES = [
    {"question": f"Question {number}: which one?", "choices": ["the first", "the sécond", "東京"], "answer": number % 3}
    for number in range(6)
]
TEXTS = [{"text": f"Text number {number} goes on for a while, " + "and on " * number} for number in range(4)]
TASK = """
task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {file}
test_split: test
output_type: {kind}
{rest}
"""


def call(path: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(URL + path, data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def write_task(directory: Path, name: str, kind: str, rows: list[dict[str, Any]], rest: str) -> None:
    file = directory / f"{name}.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (directory / f"{name}.yaml").write_text(TASK.format(name=name, file=file, kind=kind, rest=rest))


def write_tokenizer(directory: Path) -> Path:
    """The server's tokenizer as a directory that the harness can load."""
    info = call("/get_model_info")
    (directory / "tokenizer.json").write_bytes(Path(info["tokenizer_path"]).read_bytes())
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "bos_token": "<|im_start|>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


with tempfile.TemporaryDirectory() as name:
    home = Path(name)
    acc = "metric_list:\n  - metric: acc\n    aggregation: mean\n    higher_is_better: true"
    choose = 'doc_to_text: "{{question}}"\ndoc_to_choice: "{{choices}}"\ndoc_to_target: "{{answer}}"\n' + acc
    write_task(home, "our_choices", "multiple_choice", CHOICES, choose)
    words = (
        "metric_list:\n  - metric: word_perplexity\n    aggregation: weighted_perplexity\n    higher_is_better: false"
    )
    write_task(
        home, "our_texts", "loglikelihood_rolling", TEXTS, 'doc_to_text: ""\ndoc_to_target: "{{text}}"\n' + words
    )
    until = (
        'doc_to_text: "{{question}}"\ndoc_to_target: "x"\ngeneration_kwargs:\n  until: ["zzzz"]\n  max_gen_toks: 5\n'
    )
    exact = "metric_list:\n  - metric: exact_match\n    aggregation: mean\n    higher_is_better: true"
    write_task(home, "our_generation", "generate_until", CHOICES, until + exact)
    (home / "tokenizer").mkdir()
    tasks = ["our_choices", "our_texts", "our_generation"]
    found = lm_eval.simple_evaluate(
        model="local-completions",
        model_args={
            "model": "default",
            "base_url": URL + "/v1/completions",
            "num_concurrent": 2,
            "max_retries": 1,
            "batch_size": 2,
            "max_length": 4096,
            "tokenizer_backend": "huggingface",
            "tokenizer": str(write_tokenizer(home / "tokenizer")),
        },
        tasks=tasks,
        task_manager=TaskManager(include_path=str(home), include_defaults=False),
        log_samples=True,
        bootstrap_iters=0,
    )

results, samples = found["results"], found["samples"]
assert [len(samples[task]) for task in tasks] == [6, 4, 6]
assert 0 <= results["our_choices"]["acc,none"] <= 1
assert math.isfinite(results["our_texts"]["word_perplexity,none"])
for sample in samples["our_choices"]:
    doc = sample["doc"]
    for choice, response in zip(doc["choices"], sample["resps"], strict=True):
        context = call("/tokenize", {"prompt": doc["question"], "add_special_tokens": False})["tokens"]
        both = call("/tokenize", {"prompt": f"{doc['question']} {choice}", "add_special_tokens": False})["tokens"]
        direct = call("/v1/completions", {"prompt": both, "max_tokens": 0, "echo": True, "logprobs": 1, "seed": 1234})
        values = direct["choices"][0]["logprobs"]["token_logprobs"][len(context) :]
        assert math.isclose(float(response[0][0]), sum(values), abs_tol=1e-6), (response, values)
print(f"choices: {len(samples['our_choices'])} questions, each log-likelihood is the server's own")
print(f"texts: word perplexity {results['our_texts']['word_perplexity,none']:.3g}")
assert all(sample["resps"][0][0] for sample in samples["our_generation"])
print(f"generation: {len(samples['our_generation'])} answers")
