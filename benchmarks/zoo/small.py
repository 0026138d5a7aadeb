"""The networks that CI tries: small, of every package, and of every kind of layer that others have."""

SMALL: tuple[str, ...] = ()
