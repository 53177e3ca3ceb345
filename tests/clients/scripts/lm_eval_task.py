"""`lm-eval`: one small task, through the server and through `transformers`."""

import json
import os
import pathlib
from typing import Any

import lm_eval
import yaml
from harness import GIVEN, report
from lm_eval.tasks import TaskManager

os.environ["OPENAI_API_KEY"] = GIVEN["key"]
QUESTIONS = [
    ("Once upon a time", [" there was a", " there was the fox"], 0),  # the first choice is far likelier
    ("Once upon a time there was a", [" rabbit", " quiet fox", " house of green stone"], 0),
    ("Ivy was tired and lay down under a", [" tree", " bridge to sleep", " carrot"], 0),
    ("The fox said:", [" Hello.", " I am lost in the forest.", " No"], 1),
    ("In the morning the wind blew over the", [" hill", " meadow and the river", " town", " sea"], 1),
    ("My favourite colour is", [" red.", " green.", " blue."], 2),
]
NAME = "tiny_choices"
# Both get texts as ids, with the token that begins every text.
COMMON = {"batch_size": 2, "add_bos_token": True}


def write_task() -> TaskManager:
    here = pathlib.Path.cwd()
    lines = (json.dumps({"question": q, "choices": c, "answer": a}) for q, c, a in QUESTIONS)
    (here / "questions.jsonl").write_text("\n".join(lines) + "\n")
    task = {
        "task": NAME,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(here / "questions.jsonl")}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}],
    }
    (here / f"{NAME}.yaml").write_text(yaml.safe_dump(task))
    return TaskManager(include_path=str(here), include_defaults=False)


def evaluate(kind: str, **arguments: Any) -> Any:
    """Return each choice's log-likelihood, whether it is the greedy continuation, and the accuracy."""
    done = lm_eval.simple_evaluate(
        model=kind, model_args=COMMON | arguments, tasks=[NAME], task_manager=write_task(), log_samples=True
    )
    samples = sorted(done["samples"][NAME], key=lambda sample: sample["doc_id"])
    return {
        "likelihoods": [[float(each[0][0]) for each in sample["resps"]] for sample in samples],
        "greedy": [[bool(each[0][1]) for each in sample["resps"]] for sample in samples],
        "accuracy": done["results"][NAME]["acc,none"],
    }


def served() -> Any:
    return evaluate(
        "local-completions",
        model=GIVEN["model"],
        base_url=f"{GIVEN['base_url']}/completions",
        tokenizer=GIVEN["tokenizer"],
        tokenizer_backend="huggingface",
        max_length=1024,
        max_retries=1,
    )


def computed() -> Any:
    # The cache confuses contexts and choices that overlap, as in the first two questions, so it is off.
    return evaluate("hf", pretrained=GIVEN["tokenizer"], dtype="float32", device="cpu", logits_cache=False)


def likelihoods() -> Any:
    """Compare the server's log-likelihoods with those of `transformers`."""
    ours, theirs = served(), computed()
    assert len(ours["likelihoods"]) == len(QUESTIONS)
    for row, expected in zip(ours["likelihoods"], theirs["likelihoods"], strict=True):
        assert all(abs(a - b) < 1e-4 for a, b in zip(row, expected, strict=True)), (row, expected)
    assert ours["greedy"] == theirs["greedy"]
    assert ours["greedy"][0] == [True, False]
    assert ours["accuracy"] == theirs["accuracy"]
    return ours


report(said=[likelihoods])
