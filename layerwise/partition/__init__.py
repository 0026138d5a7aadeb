"""Partition: who computes, owns, needs, sends and shares what in a plan. numpy only.

It is decided here once, for all devices: `cost` prices it, `run` executes it, `measure` times it. So the bytes that are
sent are the bytes that were predicted.
"""
