"""A report's values as JSON, for programs."""

from __future__ import annotations

import json
from dataclasses import asdict

from layerwise.errors import LayerwiseError


def text(values: object) -> str:
    """JSON has no infinity and no NaN: Raises LayerwiseError if there is one."""
    try:
        return json.dumps(values, indent=1, allow_nan=False, default=asdict)
    except ValueError:
        raise LayerwiseError(
            "an answer is beyond the range of numbers, so JSON cannot say it: check the profile's rates and latencies"
        ) from None
