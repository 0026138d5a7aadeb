"""Reports: a command's output as plain data; `text`, `as_json`, `markdown` and `html` write it.

`content` has the parts of a report, `figures` writes figures, and each format has a file. They do not know what a
report is about.
"""
