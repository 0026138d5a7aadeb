"""The cost of a strategy: t_C, t_X, t_S, memory; the additive `step_time_s` and the simulated `timeline_s`."""
