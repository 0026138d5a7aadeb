"""Answers for volumes that fit no device: read, computed, reduced and written box by box."""
