"""Compile a trained sentence encoder to NVFP4, and see what that does to its embeddings.

    python examples/embed_sentences.py [--batch N] [--dump FOLDER]

The model is all-MiniLM-L6-v2 in BF16. The texts are sentence pairs (minilm.py) and passages of the Python
language reference. What NVFP4 gives is compared with the same model in FP32, and with Inductor in BF16.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from statistics import median

import minilm
import torch
from torch import Tensor

import fp4_compile


def main() -> None:
    """Plan, compile, embed, compare, time."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--batch", type=int, default=32, help="texts per call (default 32)")
    parser.add_argument("--dump", default="demo_dump", help="folder for the graphs (default demo_dump)")
    arguments = parser.parse_args()
    if arguments.batch < 1:
        parser.error("--batch takes 1 or more")

    texts = minilm.Texts()
    inputs = minilm.batches(texts.all, arguments.batch)
    exact_model, model = minilm.load_encoder(), minilm.load_encoder(torch.bfloat16)
    print(f"all-MiniLM-L6-v2, {arguments.batch} x {minilm.TOKENS} tokens a call, {len(texts.all)} texts")

    title("What the backend decides: fp4_compile.explain(model, **batch)")
    with torch.no_grad():
        print(fp4_compile.explain(model, **inputs[0]))

    title("Compile")
    older = graph_folders(arguments.dump)
    nvfp4 = torch.compile(model, backend="nvfp4", options={"dump": arguments.dump})
    inductor = torch.compile(model)
    compiled = {"NVFP4": nvfp4, "Inductor BF16": inductor}
    for name, call in compiled.items():
        print(f"{name:<16}", end="", flush=True)
        start = time.perf_counter()
        with torch.no_grad():
            call(**inputs[0])
        print(f"{time.perf_counter() - start:6.1f} s for the first call")
    print("The first of the two also starts Inductor; benchmarks/encoder.py compares the compile times.")

    title("Embeddings, against the same model in FP32")
    models = {"FP32": exact_model, **compiled}
    print_accuracy(texts, {name: minilm.embed(call, inputs, name) for name, call in models.items()})

    title("Speed on this CPU: a warm call, median of 7")
    times = minilm.warm_ms({name: partial(call, **inputs[0]) for name, call in compiled.items()}, 7)
    for name, values in times.items():
        print(f"{name:<16}{median(values):6.0f} ms")
    ratio = median(times["NVFP4"]) / median(times["Inductor BF16"])
    print(f"NVFP4 takes {ratio:.2f} times as long. A CPU has no FP4 arithmetic: products of blocks are exact integer")
    print("ones, the numbers a tensor core gives. This says nothing of how fast the model gets on a GPU.")

    for folder in sorted(graph_folders(arguments.dump) - older):
        title(f"Dumped to {folder}/")
        print("\n".join(sorted(file.name for file in folder.iterdir())))


def print_accuracy(texts: minilm.Texts, found: dict[str, Tensor]) -> None:
    """The measures against the FP32 embeddings, and the mean similarity of each kind of pair, a line each."""
    measures = [texts.compare(vectors, found["FP32"]) for vectors in found.values()]
    print_row("", found, "")
    print_row("cosine similarity to FP32's vector, mean", [m["cosine_mean"] for m in measures], ".4f")
    print_row("cosine similarity to FP32's vector, least", [m["cosine_min"] for m in measures], ".4f")
    print_row("rank correlation of the pairs' similarities", [m["spearman"] for m in measures], ".4f")
    print_row("search: best passage is the one FP32 finds", [m["top1_agreement"] for m in measures], ".1%")
    print_row("search: best passage is the right one", [m["top1_right"] for m in measures], ".1%")
    groups = [texts.group_similarity(vectors) for vectors in found.values()]
    for group, pairs in minilm.SENTENCE_PAIRS.items():
        print_row(f"similarity of {len(pairs)} {group} pairs, mean", [mean[group] for mean in groups], ".2f")


def print_row(label: str, cells: Iterable[object], form: str) -> None:
    """One line of a table."""
    print(f"{label:<48}" + "".join(f"{cell:>16{form}}" for cell in cells))


def graph_folders(folder: str) -> set[Path]:
    """The dumped graphs in a folder."""
    return set(Path(folder).glob("graph_*"))


def title(text: str) -> None:
    """A heading."""
    print(f"\n{text}\n{'-' * len(text)}")


if __name__ == "__main__":
    main()
