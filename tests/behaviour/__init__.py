"""What a user sees of a compiled model, by the kind of fault it must not have."""

from __future__ import annotations
