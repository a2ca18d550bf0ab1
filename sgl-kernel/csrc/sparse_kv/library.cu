// What the loader asks before it trusts a library: sizes of the argument structs, the sources it was built from.
#include "common.cuh"

using namespace skv;

#ifndef SKV_SOURCES
#define SKV_SOURCES unknown
#endif
#define SKV_STRING(x) #x
#define SKV_STRING_OF(x) SKV_STRING(x)

// Hash of the sources.
SKV_EXPORT const char* skv_sources() { return SKV_STRING_OF(SKV_SOURCES); }

// Sizes of the structs in the order of ops/abi.py; returns how many there are.
SKV_EXPORT int64_t skv_sizes(int64_t* sizes, int64_t room) {
  const int64_t all[] = {sizeof(SkvInts),   sizeof(SkvView),   sizeof(SkvWork),  sizeof(SkvResolve),
                         sizeof(SkvAppend), sizeof(SkvScore),  sizeof(SkvSelect), sizeof(SkvGather),
                         sizeof(SkvStage),  sizeof(SkvChunk),  sizeof(SkvStep),
                         sizeof(SkvAttend), sizeof(SkvLand),  sizeof(SkvAbsent), sizeof(Launch)};
  const int64_t count = sizeof(all) / sizeof(all[0]);
  for (int64_t i = 0; i < count && i < room; ++i) sizes[i] = all[i];
  return count;
}

// Shared memory that a block may have.
SKV_EXPORT int64_t skv_shared_limit(int64_t device) { return shared_limit(static_cast<int>(device)); }

#ifdef SPARSE_KV_EMULATE
SKV_EXPORT const char* skv_error(int) { return "emulated"; }
SKV_EXPORT void* skv_device_pointer(void* host, int64_t) { return host; }
SKV_EXPORT void skv_seed(int64_t seed) { emulator::state.random.seed(static_cast<unsigned>(seed)); }
#else
SKV_EXPORT const char* skv_error(int status) { return cudaGetErrorString(static_cast<cudaError_t>(status)); }

// The address by which kernels reach registered host memory, or null.
SKV_EXPORT void* skv_device_pointer(void* host, int64_t device) {
  void* mapped = nullptr;
  if (cudaSetDevice(static_cast<int>(device)) != cudaSuccess) return nullptr;
  return cudaHostGetDevicePointer(&mapped, host, 0) == cudaSuccess ? mapped : nullptr;
}
#endif
