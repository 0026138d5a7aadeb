"""Matplotlib figures (imported only to draw): `structure` of graphs, `tables` of costs, `devices` and `step` of who
does what when, in the colours of `looks`. They know results; `layerwise.plot` has the public ones.
"""
