import torch
def allows_channels_last(model): 
    convs=[m for m in model.modules() if isinstance(m, torch.nn.Conv2d)]
    return bool(convs) and all(c.out_channels%8==0 for c in convs) and all(c.in_channels%8==0 for c in convs[1:])
def to_channels_last(model): model.to(memory_format=torch.channels_last)
