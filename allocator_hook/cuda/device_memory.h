// Device memory, from CUDA's stream-ordered pool where the driver has one, else from cudaMalloc. Holds no lock of ours anywhere.
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

// Two threads may both decide at first; they come to the same answer.
inline int decide(int device) {
  const cuda::Runtime& runtime = cuda::runtime();
  int supported = 0;
  cuda::Pool pool = nullptr;
  uint64_t keep_all = UINT64_MAX;
  const bool pooled = mode == Mode::kPoolIfAny && runtime.has_pools &&
                      runtime.DeviceGetAttribute(&supported, cuda::kAttributeMemoryPoolsSupported, device) == cuda::kSuccess &&
                      supported != 0 && runtime.DeviceGetDefaultMemPool(&pool, device) == cuda::kSuccess &&
                      runtime.MemPoolSetAttribute(pool, cuda::kPoolReleaseThreshold, &keep_all) == cuda::kSuccess;
  if (!pooled) runtime.GetLastError();  // no error of ours may surface in PyTorch's next check
  pools[device] = pool;
  return decision[device] = pooled ? kPooled : kPlain;
}
}  // namespace detail

inline bool is_device(int device) { return device >= 0 && device < kDevices; }

// How memory is asked for from now on.
inline void set_mode(Mode mode) {
  detail::mode = mode;
  for (auto& decision : detail::decision) decision = detail::kUndecided;
}

inline bool uses_pool(int device) {
  int decision = detail::decision[device];
  if (decision == detail::kUndecided) decision = detail::decide(device);
  return decision == detail::kPooled;
}

// `bytes` of device memory, in the order of `stream`; pointer is null where there is none left.
inline Block allocate(size_t bytes, int device, cuda::Stream stream) {
  const cuda::Runtime& runtime = cuda::runtime();
  cuda::DeviceScope scope(device);
  Block block;
  block.pooled = uses_pool(device);
  int error;
  if (block.pooled) {
    cuda::Pool pool = detail::pools[device];
    error = runtime.MallocFromPoolAsync(&block.pointer, bytes, pool, stream);
    if (error == cuda::kErrorMemoryAllocation) {  // once more after the pool gave back what it keeps
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

// Gives `block` back once `stream`, and every stream of `users`, has come as far as it is now.
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
    error = runtime.Free(block.pointer);  // waits for the whole device
  }
  if (error != cuda::kSuccess) runtime.GetLastError();
}

}  // namespace device_memory
