"""What a command shows, as plain data; `text`, `as_json` and `html` write it, and know nothing of what it is about."""
