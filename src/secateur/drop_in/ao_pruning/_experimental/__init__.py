"""The drop-ins for `torch.ao.pruning._experimental`, under the same paths."""
