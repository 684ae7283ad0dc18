// Device memory from CUDA's stream-ordered memory pool if the driver supports it, else from cudaMalloc. Takes no locks.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "cuda_runtime.h"

namespace device_memory {

enum class Mode { kPoolIfAny = 0, kPlain = 1 };

constexpr int kDevices = 64;

struct Block {
  void* pointer = nullptr;
  bool pooled = false;
};

namespace detail {
inline std::atomic<Mode> mode{Mode::kPoolIfAny};
enum : int { kUndecided = 0, kPooled = 1, kPlain = 2 };
inline std::atomic<int> decision[kDevices];
inline std::atomic<cuda::Pool> pools[kDevices];

// Two threads may run this at the same time; both get the same result.
inline int decide(int device) {
  const cuda::Runtime& runtime = cuda::runtime();
  int supported = 0;
  cuda::Pool pool = nullptr;
  uint64_t keep_all = UINT64_MAX;
  const bool pooled = mode == Mode::kPoolIfAny && runtime.has_pools &&
                      runtime.DeviceGetAttribute(&supported, cuda::kAttributeMemoryPoolsSupported, device) == cuda::kSuccess &&
                      supported != 0 && runtime.DeviceGetDefaultMemPool(&pool, device) == cuda::kSuccess &&
                      runtime.MemPoolSetAttribute(pool, cuda::kPoolReleaseThreshold, &keep_all) == cuda::kSuccess;
  if (!pooled) runtime.GetLastError();  // clear our error, so that PyTorch's next check does not see it
  pools[device] = pool;
  return decision[device] = pooled ? kPooled : kPlain;
}
}  // namespace detail

inline bool is_device(int device) { return device >= 0 && device < kDevices; }

// Sets how memory is allocated from now on.
inline void set_mode(Mode mode) {
  detail::mode = mode;
  for (auto& decision : detail::decision) decision = detail::kUndecided;
}

inline bool uses_pool(int device) {
  int decision = detail::decision[device];
  if (decision == detail::kUndecided) decision = detail::decide(device);
  return decision == detail::kPooled;
}

// Allocates `bytes` of device memory in the order of `stream`. The pointer is null if the allocation fails.
inline Block allocate(size_t bytes, int device, cuda::Stream stream) {
  const cuda::Runtime& runtime = cuda::runtime();
  cuda::DeviceScope scope(device);
  Block block;
  block.pooled = uses_pool(device);
  int error;
  if (block.pooled) {
    cuda::Pool pool = detail::pools[device];
    error = runtime.MallocFromPoolAsync(&block.pointer, bytes, pool, stream);
    if (error == cuda::kErrorMemoryAllocation) {  // retry after the pool has released its unused memory
      runtime.GetLastError();
      runtime.DeviceSynchronize();
      runtime.MemPoolTrimTo(pool, 0);
      error = runtime.MallocFromPoolAsync(&block.pointer, bytes, pool, stream);
    }
  } else {
    error = runtime.Malloc(&block.pointer, bytes);
  }
  if (error != cuda::kSuccess) {
    runtime.GetLastError();
    block.pointer = nullptr;
  }
  return block;
}

// Frees `block` after the work submitted so far to `stream` and to the streams in `users` has finished.
inline void release(Block block, int device, cuda::Stream stream, const std::vector<cuda::Stream>& users) {
  const cuda::Runtime& runtime = cuda::runtime();
  cuda::DeviceScope scope(device);
  int error = cuda::kSuccess;
  if (block.pooled) {
    for (cuda::Stream user : users) {
      cuda::Event event = nullptr;
      const bool waits = runtime.EventCreateWithFlags(&event, cuda::kEventDisableTiming) == cuda::kSuccess &&
                         runtime.EventRecord(event, user) == cuda::kSuccess &&
                         runtime.StreamWaitEvent(stream, event, 0) == cuda::kSuccess;
      if (event != nullptr) runtime.EventDestroy(event);
      if (!waits) runtime.DeviceSynchronize();
    }
    error = runtime.FreeAsync(block.pointer, stream);
  } else {
    error = runtime.Free(block.pointer);  // synchronizes the device
  }
  if (error != cuda::kSuccess) runtime.GetLastError();
}

}  // namespace device_memory
