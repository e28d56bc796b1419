"""What a tensor is converted to before it is sent."""


def reduce_tensor(tensor):
    return type(tensor), (tensor.device.type,)


reduce_storage = reduce_tensor
