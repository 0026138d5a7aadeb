"""Many small cases in one test: an id each would cost more than the case itself."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def case(*what: object) -> Iterator[None]:
    """What fails inside says of which case it is."""
    try:
        yield
    except Exception as error:
        error.add_note(f"in the case {', '.join(map(str, what))}")
        raise
