"""A card for each method: its name, paper and parameters, what it exchanges and what it can be combined with.

The registry finds every module of this package and reads its `CARD`; adding a method adds a module and changes none.
Cards import no torch.
"""
