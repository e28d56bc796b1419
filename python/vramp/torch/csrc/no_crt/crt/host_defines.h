// The headers of the CUDA runtime, as PyTorch's wheels install them, include this file, which comes with
// the compiler for device code. Host code needs only these words of it. The folder is searched after
// all others, so an installed file is preferred.

#pragma once

#define CUDARTAPI
#define CUDARTAPI_CDECL
#define __host__
#define __device__
#define __global__
#define __device_builtin__
#define __device_builtin_texture_type__
#define __device_builtin_surface_type__
#define __cudart_builtin__
#define __align__(n) __attribute__((aligned(n)))
#define __builtin_align__(n) __align__(n)
#define __forceinline__ __inline__ __attribute__((always_inline))
