// PyTorch headers of the CUDA runtime include this file. Host code needs nothing of it: see host_defines.h.

#pragma once
