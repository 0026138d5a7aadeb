"""The calls of a training script: `parallelize`, `fit`, `split`, `save`.

`world` joins the ranks, `source` reads the model, `machine` measures, `planner` searches, `build` makes the module.
It knows all rooms but `integrations`, and none knows it but that and the commands.
"""
