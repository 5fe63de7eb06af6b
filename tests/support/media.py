"""Images that have no tokens: of models that see none."""

from __future__ import annotations

from covey.types import Medium


def unseen(key: str) -> Medium:
    """Return an image of no token."""
    return Medium(key=key, token_id=-1, num_tokens=0, grid=(1, 0, 0), extent=None)
