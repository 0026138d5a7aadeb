"""Matplotlib figures (imported only to draw): `structure` of the graph, `devices` and `step` of who does what when, in
the colours of `looks`. They know results; `layerwise.plot` has the public ones.
"""
