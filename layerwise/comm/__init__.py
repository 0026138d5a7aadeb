"""Communication between ranks: messages and collectives over all ranks or a group, with bytes counted.

`base` has what every `Comm` does; `process` runs on torch.distributed, `solo` is a single rank; `start` joins the
ranks, `together` makes them agree, `watch` names the one that failed. It knows torch.distributed and nothing of plans.
"""
