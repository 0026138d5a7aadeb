"""Measuring a machine: how long its layers take and what its links cost, written into a profile.

`cells` says what is measured of layers, `bench` and `job` do it; `topology`, `links` and `beside` are of links;
`timing` times both. It knows `comm` and `cost`; a command and `api.machine` call it.
"""
