"""Communication between ranks: messages and collectives of all or of a group, whose bytes are counted.

`base` has what every `Comm` does; `process` is torch.distributed's, `solo` one rank's; `start` joins ranks, `together`
has them agree, `watch` names the one that failed. It knows torch.distributed and nothing of plans.
"""
