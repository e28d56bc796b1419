"""The native module. Its statistics raise, as those of PyTorch's pluggable allocators do."""

_GLIBCXX_USE_CXX11_ABI = True


def _refuse(*_):
    raise RuntimeError("CUDAPluggableAllocator does not yet support getDeviceStats")


_cuda_memoryStats = _cuda_resetPeakMemoryStats = _cuda_resetAccumulatedMemoryStats = _refuse
_cuda_memorySnapshot = _refuse


def _cuda_getCurrentRawStream(device):
    """Returns the default stream."""
    return 0
