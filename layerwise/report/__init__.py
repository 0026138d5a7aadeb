"""Reports: what a command shows, as plain data, and `text`, `as_json` and `html`, which write any of them.

`content` has the parts of a report, `charts` and `picture` what is drawn, a file a format writes it. They know
configurations, for the picture of a plan, and nothing of what a report is about.
"""
