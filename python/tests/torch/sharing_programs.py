"""Programs of two processes, for test_torch_sharing.py. Each process of `spawn` imports this file."""
