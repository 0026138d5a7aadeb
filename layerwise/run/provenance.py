"""What a plan tells of how it was made, where the runtime asks for it."""

from __future__ import annotations

from layerwise.plan import Plan


def searched_with(plan: Plan, option: str) -> object:
    """One of the cost model's options that the plan was searched with; None where it does not say."""
    options = plan.provenance.get("cost_options")
    return options.get(option) if isinstance(options, dict) else None
