"""Measurements that others published, and constants derived from them."""
