"""Pages and bytes of an engine's KV caches. Standard library only."""

from __future__ import annotations

from edgellm.core.model_spec import KVCacheSpec, PageSpec

# Tokens before the window that stay cached: a later prompt may diverge this far back.
SPARE_ROWS = 64


def table_pages(pages: PageSpec, window: int, capacity: int) -> int:
    """Maximum pages of a sequence in layers with a window, 0: without.

    Args:
        pages: of the cache.
        window: tokens that a token attends to, itself included.
        capacity: tokens of a sequence.
    """
    whole = -(-capacity // pages.rows)
    if not (window and pages.pass_rows):
        return whole
    rows = window + SPARE_ROWS + pages.pass_rows
    return min(whole, -(-rows // pages.rows) + 1)  # the first may start anywhere in a page


def is_bounded(pages: PageSpec, capacity: int) -> bool:
    """Whether layers free the pages before their windows."""
    whole = table_pages(pages, 0, capacity)
    return any(table_pages(pages, window, capacity) < whole for window in pages.windows)


def pool_pages(pages: PageSpec, window: int, capacity: int, num_sequences: int) -> int:
    """Pages of all sequences together in layers with a window, 0: without.

    Bounded windows get the same number once more: for the end of a prompt, or a finished request.
    """
    held, whole = table_pages(pages, window, capacity), table_pages(pages, 0, capacity)
    return num_sequences * min(2 * held, whole)


def cache_bytes(cache: KVCacheSpec, capacity: int, num_sequences: int = 1) -> int:
    """Bytes of the caches of `num_sequences`, in whole pages if it has pages."""
    if cache.pages is None:
        return cache.bytes_per_token * capacity * num_sequences
    pages = cache.pages
    counts = (pool_pages(pages, window, capacity, num_sequences) for window in pages.windows)
    return _row_bytes(cache) * pages.rows * sum(counts)


def held_bytes(cache: KVCacheSpec, length: int) -> int:
    """Bytes that a sequence of this length holds; windows hold more than is attended to."""
    if cache.pages is None:
        return cache.bytes_per_token * length
    pages = cache.pages
    counts = (table_pages(pages, window, length) * pages.rows for window in pages.windows)
    return _row_bytes(cache) * sum(min(count, length) for count in counts)


def seen_bytes(cache: KVCacheSpec, length: int) -> int:
    """That a pass of one token reads after so many rows."""
    windows = cache.pages.windows if cache.pages is not None else (0,) * cache.num_layers
    return _row_bytes(cache) * sum(min(window or length, length) for window in windows)


def _row_bytes(cache: KVCacheSpec) -> int:
    """Bytes of a token in one layer."""
    return cache.bytes_per_token // max(cache.num_layers, 1)
