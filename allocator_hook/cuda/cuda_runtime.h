// The CUDA runtime that is already loaded in this process. Its functions are looked up by name, so the build needs neither CUDA
// headers nor libraries.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>

#include <dlfcn.h>
#include <link.h>

namespace cuda {

using Stream = void*;
using Pool = void*;
using Event = void*;

// Values from driver_types.h, unchanged since CUDA 11.2.
constexpr int kSuccess = 0;
constexpr int kErrorMemoryAllocation = 2;
constexpr int kAttributeMemoryPoolsSupported = 115;  // cudaDevAttrMemoryPoolsSupported
constexpr int kPoolReleaseThreshold = 4;             // cudaMemPoolAttrReleaseThreshold
constexpr unsigned kEventDisableTiming = 2;          // cudaEventDisableTiming

struct Runtime {
  int (*Malloc)(void**, size_t) = nullptr;
  int (*Free)(void*) = nullptr;
  int (*GetDevice)(int*) = nullptr;
  int (*SetDevice)(int) = nullptr;
  int (*GetLastError)() = nullptr;
  int (*DeviceSynchronize)() = nullptr;
  // The following functions exist since CUDA 11.2. They are used only if all of them are found.
  int (*DeviceGetAttribute)(int*, int, int) = nullptr;
  int (*DeviceGetDefaultMemPool)(Pool*, int) = nullptr;
  int (*MemPoolSetAttribute)(Pool, int, void*) = nullptr;
  int (*MemPoolTrimTo)(Pool, size_t) = nullptr;
  int (*MallocFromPoolAsync)(void**, size_t, Pool, Stream) = nullptr;
  int (*FreeAsync)(void*, Stream) = nullptr;
  int (*EventCreateWithFlags)(Event*, unsigned) = nullptr;
  int (*EventRecord)(Event, Stream) = nullptr;
  int (*EventDestroy)(Event) = nullptr;
  int (*StreamWaitEvent)(Stream, Event, unsigned) = nullptr;

  bool has_pools = false;
  std::string error;  // why the runtime cannot be used; empty if it can
};

namespace detail {

inline int find_loaded(dl_phdr_info* object, size_t, void* found) {
  if (object->dlpi_name == nullptr || std::strstr(object->dlpi_name, "libcudart") == nullptr) return 0;
  *static_cast<std::string*>(found) = object->dlpi_name;
  return 1;
}

template <typename Function>
bool look_up(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  return function != nullptr;
}

inline Runtime load() {
  Runtime runtime;
  void* library = RTLD_DEFAULT;
  std::string path;
  if (const char* given = std::getenv("ALLOCATOR_HOOK_CUDART")) {
    library = dlopen(given, RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
      runtime.error = dlerror();
      return runtime;
    }
  } else if (dl_iterate_phdr(find_loaded, &path) != 0) {
    library = dlopen(path.c_str(), RTLD_NOW | RTLD_NOLOAD);
    if (library == nullptr) library = RTLD_DEFAULT;
  }
  const bool has_basics = look_up(library, "cudaMalloc", runtime.Malloc) && look_up(library, "cudaFree", runtime.Free) &&
                          look_up(library, "cudaGetDevice", runtime.GetDevice) &&
                          look_up(library, "cudaSetDevice", runtime.SetDevice) &&
                          look_up(library, "cudaGetLastError", runtime.GetLastError) &&
                          look_up(library, "cudaDeviceSynchronize", runtime.DeviceSynchronize);
  if (!has_basics) {
    runtime.error = "no CUDA runtime (libcudart) is loaded in this process";
    return runtime;
  }
  runtime.has_pools = look_up(library, "cudaDeviceGetAttribute", runtime.DeviceGetAttribute) &&
                      look_up(library, "cudaDeviceGetDefaultMemPool", runtime.DeviceGetDefaultMemPool) &&
                      look_up(library, "cudaMemPoolSetAttribute", runtime.MemPoolSetAttribute) &&
                      look_up(library, "cudaMemPoolTrimTo", runtime.MemPoolTrimTo) &&
                      look_up(library, "cudaMallocFromPoolAsync", runtime.MallocFromPoolAsync) &&
                      look_up(library, "cudaFreeAsync", runtime.FreeAsync) &&
                      look_up(library, "cudaEventCreateWithFlags", runtime.EventCreateWithFlags) &&
                      look_up(library, "cudaEventRecord", runtime.EventRecord) &&
                      look_up(library, "cudaEventDestroy", runtime.EventDestroy) &&
                      look_up(library, "cudaStreamWaitEvent", runtime.StreamWaitEvent);
  return runtime;
}

}  // namespace detail

inline const Runtime& runtime() {
  static const Runtime& loaded = *new Runtime(detail::load());  // never destroyed: PyTorch frees memory during process exit
  return loaded;
}

// Makes `device` the current device and restores the previous one on destruction.
class DeviceScope {
 public:
  explicit DeviceScope(int device) {
    if (runtime().GetDevice(&before_) == kSuccess && before_ != device) switched_ = runtime().SetDevice(device) == kSuccess;
  }
  ~DeviceScope() {
    if (switched_) runtime().SetDevice(before_);
  }
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;

 private:
  int before_ = 0;
  bool switched_ = false;
};

}  // namespace cuda
