"""Hypothesis: no deadline (this runs on shared machines), more examples on request: HYPOTHESIS_PROFILE=thorough."""

import os

from hypothesis import settings

settings.register_profile("default", deadline=None, max_examples=60)
settings.register_profile("thorough", deadline=None, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))
