/* Functions of libcuda that PyTorch's library for compiled kernels imports. No kernel is compiled here, so
   each returns CUDA_ERROR_NOT_SUPPORTED. Apart from cuda.h, for the arguments do not matter. */

#define NOT_SUPPORTED 801
#define UNUSED(name) \
  int name(void) { return NOT_SUPPORTED; }

UNUSED(cuFuncGetAttribute)
UNUSED(cuFuncSetAttribute)
UNUSED(cuFuncSetCacheConfig)
UNUSED(cuLaunchCooperativeKernel)
UNUSED(cuLaunchKernel)
UNUSED(cuLinkAddData_v2)
UNUSED(cuLinkComplete)
UNUSED(cuLinkCreate_v2)
UNUSED(cuModuleGetFunction)
UNUSED(cuModuleLoad)
UNUSED(cuModuleLoadData)
UNUSED(cuModuleLoadDataEx)
UNUSED(cuModuleUnload)
UNUSED(cuOccupancyMaxActiveBlocksPerMultiprocessor)
UNUSED(cuTensorMapEncodeTiled)
