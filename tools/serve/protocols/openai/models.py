"""Model cards of the engines, in OpenAI's form."""

from __future__ import annotations

from typing import Any

from edgellm.tools.serve.routing.engine_pool import EnginePool, Place

Card = dict[str, Any]


def all_cards(engines: EnginePool) -> list[Card]:
    """Cards of all engines, each followed by its adapters."""
    cards: list[Card] = []
    for place in engines.places:
        cards.append(card(engines, place))
        cards += [card(engines, place, name) for name in place.adapter_names]
    return cards


def card(engines: EnginePool, place: Place, adapter: str | None = None) -> Card:
    """The card of an engine, or of one of its adapters."""
    name = place.model.name
    return {
        "id": adapter or name,
        "object": "model",
        "created": engines.created,
        "owned_by": "edgellm",
        "max_model_len": place.model.manifest.max_kv_cache_capacity,
        "loaded": place.worker is not None,
    } | ({} if adapter is None else {"parent": name})
