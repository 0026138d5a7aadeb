"""Reports: what a command shows, as plain data, and `text`, `as_json` and `html`, which write any of them."""
