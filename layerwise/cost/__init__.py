"""The cost of a strategy: t_C, t_X, t_S and memory; the additive `step_time_s` and the simulated `timeline_s`.

`model` prices configurations by the rows of `terms`; `compute/` has t_C, `transfer` t_X, `sums` t_S; `timeline/` and
`memory/` fold the program. It knows `program`, `partition` and `machine`, and nothing of search or PyTorch.
"""
