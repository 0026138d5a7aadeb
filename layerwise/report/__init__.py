"""Reports: what a command shows, as plain data, and `text`, `as_json` and `html`, which write any of them.

`content` has the parts of a report, `figures` how a figure is written, a file a format writes it. They know
nothing of what a report is about.
"""
