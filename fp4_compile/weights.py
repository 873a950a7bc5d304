"""When a hoisted weight quantization is still good, and when it runs again.

What is guaranteed, for an inference graph whose weight quantizers were hoisted out (`passes.hoist_weights`):

- exact: any replaced tensor (``load_state_dict(assign=True)``, a new Parameter, ``.data = other``), and any edit
  that torch's version counter sees (optimizers, ``load_state_dict``, ``copy_``, every in-place operator), is seen
  at the next call. Tensors made under ``inference_mode`` have no version counter; their whole content is hashed.
- sampled: an edit behind the version counter's back (through ``.data``, NumPy, or foreign code) is seen if it
  changes one of up to 512 elements spread evenly over the weight: a merge or a weight sync always is.
- `invalidate` is for the rest: an edit of a few elements through ``.data``.

Nothing here keeps a weight alive, and nothing is keyed on an address alone: addresses are reused.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

SAMPLES = 512
CHUNK = 2**20
"""Elements that are hashed at a time, so that the hash of a large weight needs little memory."""

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

_stores: weakref.WeakSet[WeightStore] = weakref.WeakSet()


@dataclasses.dataclass
class _Entry:
    owners: tuple[weakref.ref[Tensor], ...]
    stamps: tuple[tuple[int, int], ...]
    fingerprint: Tensor
    values: tuple[Tensor, ...]


class WeightStore:
    """The quantized weights of one compiled graph, one entry for each set of weights it is called with."""

    def __init__(self, quantize: Callable[..., Sequence[Tensor]]) -> None:
        self._quantize = quantize
        self._entries: dict[tuple[int, ...], _Entry] = {}
        self._lock = threading.Lock()
        self.runs = 0
        """How often weights were quantized."""
        _stores.add(self)

    def get(self, weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The quantized form of these weights as they are now."""
        key = tuple(map(id, weights))
        stamps = tuple(map(_stamp, weights))
        fingerprint = _fingerprint(weights)
        entry = self._entries.get(key)
        if (
            entry is not None
            and entry.stamps == stamps
            and all(owner() is weight for owner, weight in zip(entry.owners, weights, strict=True))
            and torch.equal(entry.fingerprint, fingerprint)
        ):
            return entry.values
        with torch.no_grad():
            values = tuple(self._quantize(*weights))
        self.runs += 1
        owners = tuple(weakref.ref(weight, self._forget(key)) for weight in weights)
        with self._lock:
            self._entries[key] = _Entry(owners, stamps, fingerprint, values)
        return values

    def drop(self, tensors: set[int]) -> None:
        """Forget every entry that one of these tensors (by id) has part in."""
        with self._lock:
            for key in [key for key in self._entries if tensors.intersection(key)]:
                del self._entries[key]

    def _forget(self, key: tuple[int, ...]) -> Callable[[object], None]:
        store = weakref.ref(self)

        def forget(owner: object) -> None:
            live = store()
            entry = live._entries.get(key) if live is not None else None
            if live is not None and entry is not None and any(ref is owner for ref in entry.owners):
                live._entries.pop(key, None)

        return forget


def invalidate(model: torch.nn.Module) -> None:
    """Have every weight of ``model`` quantized anew at the next call of any compiled graph that reads it.

    Needed only after an edit of a few elements that torch cannot see: through ``.data``, NumPy or foreign code.
    """
    tensors = {id(t) for t in (*model.parameters(), *model.buffers())}
    for store in list(_stores):
        store.drop(tensors)


def _stamp(weight: Tensor) -> tuple[int, int]:
    return weight.data_ptr(), -1 if weight.is_inference() else weight._version


def _fingerprint(weights: Sequence[Tensor]) -> Tensor:
    return torch.cat([_whole(w) if w.is_inference() else _sample(w) for w in weights])


def _sample(weight: Tensor) -> Tensor:
    """Bits of evenly spread elements. The step is odd, so that no column of a power-of-two width is favoured."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(weight.shape, weight.stride(), strict=True))
    if weight.numel() == 0:
        return torch.zeros(0, dtype=torch.int16, device=weight.device)
    step = max(1, span // SAMPLES) | 1
    sampled = weight.detach().as_strided((-(-span // step),), (step,))
    return sampled.view(_BITS[weight.element_size()])


def _whole(weight: Tensor) -> Tensor:
    """A hash of every element and its place: the bits times fixed random numbers, summed modulo 2**64, by chunks.

    An exclusive-or (torch.hash_tensor) would do no better than chance on patterns: a sign that changes everywhere
    cancels in it, and so do elements that trade places.
    """
    bits = weight.reshape(-1).view(_BITS[weight.element_size()])
    factors = _random_factors(weight.device)
    chunks = torch.split(bits, CHUNK)
    hashes = torch.stack([(chunk.to(torch.int64) * factors[: chunk.numel()]).sum() for chunk in chunks])
    return hashes if bits.numel() else hashes[:0]


@functools.cache
def _random_factors(device: torch.device) -> Tensor:
    """Odd, so that no change of one element is lost."""
    with torch.inference_mode(False):
        generator = torch.Generator().manual_seed(0)
        drawn = torch.randint(-(2**62), 2**62, (CHUNK,), generator=generator)
        return (2 * drawn + 1).to(device)
