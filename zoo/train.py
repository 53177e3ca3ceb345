"""Train the zoo: ``python -m zoo.train`` writes three Hugging Face folders beside this file.

``--name llama-tiny`` trains one of them. ``--minutes`` and ``--steps`` bound the training. ``transformers`` (a
development dependency) provides the model classes. Tests compare the server's own implementations with these
classes.
"""

import argparse
import json
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch.nn import functional
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from zoo import text, tokenizer

FOLDER = Path(__file__).resolve().parents[1] / "common" / "zoo"
CHAT_SHARE = 0.4  # of the documents; the others are plain text
INITIAL = 0.08  # deviation of new weights, about 1 / sqrt(hidden): with 0.02 models learn far more slowly
ROWS = 4  # in a batch: small steps, and many of them, teach the most in a few minutes


@dataclass(frozen=True)
class Recipe:
    """How one checkpoint is made: its tokenizer, its shape, and the tokens that end a text."""

    name: str
    build_tokenizer: Callable[[Iterator[str], int], Tokenizer]
    pieces: int
    chat_template: str
    special: dict[str, str]  # role of a token (bos_token, eos_token, pad_token, unk_token): the token
    ends: tuple[str, ...]  # the token that ends a document, then the one that ends a turn
    build_model: Callable[[PreTrainedTokenizerFast], Any]
    learning_rate: float = 3e-3


def llama_model(pieces: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Return a new model with 6 query heads on 2 kv heads, untied embeddings, and RoPE with Llama 3.1's scaling.

    Its heads have the size 32, not 144 / 6 = 24.
    """
    config = LlamaConfig(
        vocab_size=len(pieces),
        hidden_size=144,
        intermediate_size=384,
        num_hidden_layers=5,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=4096,
        rms_norm_eps=1e-5,
        initializer_range=INITIAL,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 128,
        },
        tie_word_embeddings=False,
        bos_token_id=pieces.bos_token_id,
        eos_token_id=pieces.eos_token_id,
    )
    return LlamaForCausalLM(config)


def qwen_model(pieces: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """Return a new model with 8 query heads on 4 kv heads and tied embeddings. 24 embeddings belong to no token.

    Its heads have the size 24, not 128 / 8 = 16.
    """
    config = Qwen3Config(
        vocab_size=len(pieces) + 24,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=24,
        max_position_embeddings=4096,
        initializer_range=INITIAL,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=pieces.convert_tokens_to_ids("<|im_end|>"),
    )
    return Qwen3ForCausalLM(config)


def gemma_model(pieces: PreTrainedTokenizerFast) -> Gemma3ForCausalLM:
    """Return a new model with 4 query heads on 1 kv head. Every third layer has full attention, others a window.

    Its heads have the size 48, not 128 / 4 = 32. Scores are scaled as for heads of size 40.
    """
    config = Gemma3TextConfig(
        vocab_size=len(pieces),
        hidden_size=128,
        intermediate_size=400,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=48,
        query_pre_attn_scalar=40,
        max_position_embeddings=4096,
        initializer_range=INITIAL,
        sliding_window=16,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
        rope_parameters={
            "full_attention": {"rope_type": "default", "rope_theta": 1_000_000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        },
        tie_word_embeddings=True,
        pad_token_id=pieces.pad_token_id,
        bos_token_id=pieces.bos_token_id,
        eos_token_id=pieces.convert_tokens_to_ids(["<eos>", "<end_of_turn>"]),
    )
    return Gemma3ForCausalLM(config)


RECIPES = (
    Recipe(
        name="llama-tiny",
        build_tokenizer=tokenizer.llama,
        pieces=1024,
        chat_template=tokenizer.LLAMA_CHAT,
        special={"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"},
        ends=("<|end_of_text|>", "<|eot_id|>"),
        build_model=llama_model,
    ),
    Recipe(
        name="qwen3-tiny",
        build_tokenizer=tokenizer.qwen,
        pieces=1000,
        chat_template=tokenizer.QWEN_CHAT,
        special={"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
        ends=("<|endoftext|>", "<|im_end|>"),
        build_model=qwen_model,
    ),
    Recipe(
        name="gemma3-tiny",
        build_tokenizer=tokenizer.gemma,
        pieces=1216,
        chat_template=tokenizer.GEMMA_CHAT,
        special={"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"},
        ends=("<eos>", "<end_of_turn>"),
        build_model=gemma_model,
    ),
)


def train_tokenizer(recipe: Recipe, seed: int) -> PreTrainedTokenizerFast:
    """Return the recipe's tokenizer, trained on a few thousand documents, with its chat template."""
    rng = random.Random(f"tokenizer {seed}")
    texts = [text.plain_document(rng) for _ in range(3000)]
    texts += [message["content"] for _ in range(2000) for message in text.conversation(rng)]
    trained = recipe.build_tokenizer(iter(texts), recipe.pieces)
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]  # transformers leaves it untyped
        tokenizer_object=trained,
        chat_template=recipe.chat_template,
        model_max_length=4096,
        clean_up_tokenization_spaces=False,
        **recipe.special,
    )


def documents(recipe: Recipe, pieces: PreTrainedTokenizerFast, seed: str) -> Iterator[list[int]]:
    """Yield the token ids of one document after another, without end. Each list ends with the token that ends a
    document."""
    rng = random.Random(seed)
    end: Any = pieces.convert_tokens_to_ids(recipe.ends[0])
    while True:
        if rng.random() < CHAT_SHARE:
            chat = pieces.apply_chat_template(text.conversation(rng), tokenize=False)
            yield [*pieces.encode(chat, add_special_tokens=False), end]
        else:
            yield [*pieces.encode(text.plain_document(rng)), end]


def batch(stream: Iterator[list[int]], length: int) -> torch.Tensor:
    """Return the next token ids ``[ROWS, length + 1]`` from a stream of documents.

    Each row starts where a document starts, so that the models learn to begin at position 0. If the document is
    shorter than the row, further documents fill the rest, so that late positions and long contexts occur.
    """
    rows = []
    for _ in range(ROWS):
        row: list[int] = []
        while len(row) <= length:
            row += next(stream)
        rows.append(row[: length + 1])
    return torch.tensor(rows)


def loss_of(model: Any, rows: torch.Tensor) -> torch.Tensor:
    """Return the mean next-token cross-entropy, in nats, of rows of token ids ``[B, L + 1]``."""
    logits = model(input_ids=rows[:, :-1], use_cache=False).logits
    return functional.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten())


@torch.no_grad()
def evaluate(model: Any, recipe: Recipe, pieces: PreTrainedTokenizerFast) -> float:
    """Return the mean loss on 16 held-out batches of 512-token rows."""
    stream = documents(recipe, pieces, "held out")
    return sum(float(loss_of(model, batch(stream, 512))) for _ in range(16)) / 16


def optimizer_for(model: Any, learning_rate: float) -> torch.optim.AdamW:
    """Return an AdamW that decays matrices only. Decay pulls weights to zero, and norm weights belong near one.

    Gemma's norm weights belong near zero. They are not decayed either.
    """
    matrices = [weight for weight in model.parameters() if weight.ndim > 1]
    vectors = [weight for weight in model.parameters() if weight.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.98))


def train(recipe: Recipe, *, steps: int, minutes: float, seed: int, folder: Path) -> dict[str, Any]:
    """Train one checkpoint and write its folder. Returns a record of the run: its size, steps, tokens and losses.

    Training stops after ``steps`` or ``minutes``, whichever comes first. The learning rate rises over the first
    2 % of the training and falls linearly to zero at its end.
    """
    torch.manual_seed(seed)
    started = time.monotonic()
    pieces = train_tokenizer(recipe, seed)
    model = recipe.build_model(pieces)
    optimizer = optimizer_for(model, recipe.learning_rate)
    stream = documents(recipe, pieces, f"train {seed}")
    step = tokens = 0
    while True:
        seconds = time.monotonic() - started
        progress = max(step / steps, seconds / (60 * minutes))
        if progress >= 1:
            break
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate * min(progress / 0.02 + 0.01, 1 - progress)
        # Short rows are cheaper. Long ones come late, when only long contexts still teach something.
        rows = batch(stream, 256 if progress < 0.7 else 512)
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model, rows)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step, tokens = step + 1, tokens + rows[:, 1:].numel()
        if step % 200 == 0:
            print(
                f"{recipe.name} step {step} ({progress:.0%}, {seconds:.0f} s): loss {loss.item():.3f}",
                flush=True,
            )
    record = {
        "name": recipe.name,
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "steps": step,
        "tokens": tokens,
        "seconds": round(time.monotonic() - started),
        "seed": seed,
    }
    model.eval()
    record["loss float32"] = round(evaluate(model, recipe, pieces), 4)
    shorten(model)
    model.to(torch.bfloat16)
    save(model, pieces, recipe, folder)
    record["loss rounded"] = round(evaluate(model.float(), recipe, pieces), 4)  # computed in float32
    record["bytes"] = sum(path.stat().st_size for path in folder.iterdir())
    return record


#: Matrices that read the vocabulary or write to the residual stream: they keep one bit more than others.
SENSITIVE = ("embed_tokens", "lm_head", "o_proj", "down_proj")


@torch.no_grad()
def shorten(model: Any) -> None:
    """Round every matrix to four significant bits, a sensitive one to five.

    The files keep their size, but git compresses them to seven tenths of that size.
    """
    for name, weight in model.named_parameters():
        if weight.ndim > 1:
            bits = 5 if any(part in name for part in SENSITIVE) else 4
            mantissa, exponent = torch.frexp(weight)  # the mantissa is in [0.5, 1)
            weight.copy_(torch.ldexp(torch.round(mantissa * 2**bits) / 2**bits, exponent))


def save(model: Any, pieces: PreTrainedTokenizerFast, recipe: Recipe, folder: Path) -> None:
    """Write a Hugging Face folder. Its generation config lists the end tokens of a document and of a turn."""
    folder.mkdir(parents=True, exist_ok=True)
    model.generation_config = GenerationConfig.from_dict(
        {
            "bos_token_id": pieces.bos_token_id,
            "eos_token_id": pieces.convert_tokens_to_ids(list(recipe.ends)),
            "pad_token_id": pieces.convert_tokens_to_ids(recipe.special.get("pad_token", recipe.ends[0])),
        }
    )
    model.save_pretrained(folder)
    pieces.save_pretrained(folder)
    for path in folder.iterdir():
        path.chmod(0o644)  # safetensors writes files that only their owner can read


def main() -> None:
    """Train the selected checkpoints, one after another, and print a record of each."""
    parser = argparse.ArgumentParser(description="Train the tiny checkpoints of the zoo.")
    parser.add_argument("--name", choices=[recipe.name for recipe in RECIPES], help="train this one only")
    parser.add_argument("--steps", type=int, default=1_000_000, help="stop after this many steps")
    parser.add_argument("--minutes", type=float, default=10.0, help="stop after this long, for each model")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and text")
    parser.add_argument("--out", type=Path, default=FOLDER, help="where the folders are written")
    options = parser.parse_args()
    torch.set_num_threads(1)  # matrices this small gain nothing from a second core
    for recipe in RECIPES:
        if options.name in (None, recipe.name):
            folder = options.out / recipe.name
            record = train(
                recipe, steps=options.steps, minutes=options.minutes, seed=options.seed, folder=folder
            )
            print(json.dumps(record))


if __name__ == "__main__":
    main()
