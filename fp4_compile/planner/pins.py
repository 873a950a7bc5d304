"""What a user pins: patterns on module paths or site keys, and the precision their matmuls shall have."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping

from fp4_compile.errors import OptionError
from fp4_compile.options import suggest
from fp4_compile.plan import Precision, Site

Pins = Mapping[str, Precision]


def parse_pins(given: Mapping[str, object]) -> dict[str, Precision]:
    """Check patterns and precisions: ``{"*.lm_head": "bf16", "layers.[0-3].*": "nvfp4"}``.

    Raises:
        OptionError: a pattern that is not text, or a precision that is neither ``"nvfp4"`` nor ``"bf16"``.
    """
    pins = {}
    for pattern, wanted in given.items():
        value = wanted.value if isinstance(wanted, Precision) else wanted
        names = [Precision.NVFP4.value, Precision.BF16.value]
        if not isinstance(pattern, str) or value not in names:
            near = suggest(value, names) if isinstance(value, str) else ""
            raise OptionError(f"pin {pattern!r}: {wanted!r}{near}; a pin gives a pattern one of {names}")
        pins[pattern] = Precision(value)
    return pins


def pinned(site: Site, pins: Pins) -> tuple[str, Precision] | None:
    """The pattern that pins a site, and to what; of several the last one given, so that exceptions follow rules."""
    found = None
    for pattern, precision in pins.items():
        if matches(site, pattern):
            found = pattern, precision
    return found


def matches(site: Site, pattern: str) -> bool:
    """Whether a shell-style pattern fits a site's module path or its key. ``*.head`` also fits ``head`` itself."""
    names = (site.module, site.key, f".{site.module}")
    return any(fnmatch.fnmatchcase(name, pattern) for name in names)


def require_known(sites: Iterable[Site], pins: Pins) -> None:
    """Refuse patterns that fit none of a model's sites.

    Raises:
        OptionError: a pattern fits nothing; the message names the nearest module.
    """
    sites = list(sites)
    modules = list(dict.fromkeys(site.module for site in sites))
    for pattern in pins:
        if not any(matches(site, pattern) for site in sites):
            raise OptionError(
                f"pin {pattern!r} fits none of the {len(modules)} modules with a matmul{suggest(pattern, modules)}; "
                f"they are {', '.join(modules[:8])}{', ...' if len(modules) > 8 else ''}"
            )
