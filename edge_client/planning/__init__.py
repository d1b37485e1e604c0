"""From a model, a workload and a budget to a plan: cost rules, the search, and the paper's own cost rule. Costs
are measured in `measuring`, and the plan is carried out in `training`.

May import: the leaves, config, wire, device, data, transport, knowledge, models.
"""
