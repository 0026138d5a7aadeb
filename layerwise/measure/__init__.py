"""Measures a machine: the times of its layers and the costs of its links, written into a profile.

`cells` lists what to measure of layers, `bench` and `job` measure it; `topology`, `links` and `beside` are for links;
`timing` times both. It knows `comm` and `cost`; a command and `api.machine` call it.
"""
