"""A report's values as JSON, for programs."""

from __future__ import annotations

import json
from dataclasses import asdict

from layerwise.errors import LayerwiseError


def text(values: object) -> str:
    """Returns the values as JSON. Raises LayerwiseError for infinity or NaN, which JSON lacks."""
    try:
        return json.dumps(values, indent=1, allow_nan=False, default=asdict)
    except ValueError:
        raise LayerwiseError(
            "a result is infinite or not a number, which JSON cannot express: check the profile's rates and latencies"
        ) from None
