"""The one error that a user of layerwise can cause."""


class LayerwiseError(ValueError):
    """Bad input: a model, plan, profile, strategy or flag that cannot be used.

    The message is one line that says what is wrong, where (layer, dimension, sizes), and what to do.
    Command lines print it and exit with code 2; anything else that is raised is a bug in layerwise.
    """
