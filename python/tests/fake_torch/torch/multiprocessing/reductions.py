"""What a tensor is converted to before it is sent."""

import torch


def rebuild_cuda_tensor(kind, device):
    torch.cuda.init()
    return kind(device)


def reduce_tensor(tensor):
    if tensor.device.type == "cuda":
        return rebuild_cuda_tensor, (type(tensor), "cuda")
    return type(tensor), (tensor.device.type,)


reduce_storage = reduce_tensor
