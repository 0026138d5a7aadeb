"""Commands that belong to no room: each has a `parser` and a `main`, and shows what rooms find out.

`layerwise.__main__` lists all commands; those of a room are its `__main__` or `command`. A command may import any
room, and no room imports one.
"""
