// The allocator that PyTorch calls through torch.cuda.memory.CUDAPluggableAllocator. It records every allocation and free.
//
// Invariants:
// - A free is recorded before it happens and an allocation after it happened. Otherwise another thread could get the same address
//   in between, and the trace would contain two live allocations at one address.
// - No lock is held during a CUDA call. One mutex protects the trace and the statistics. It is held while 48 bytes are copied, or
//   while a full buffer is written.
// - Allocations that the CUDA runtime makes through this allocator inside our own CUDA calls are not recorded.
// - A forked child does not record, because the file belongs to its parent. It may open its own trace.

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <mutex>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include <pthread.h>
#include <sys/types.h>

#include "cuda_runtime.h"
#include "device_memory.h"
#include "trace_file.h"

namespace {

struct Live {
  uint64_t bytes = 0;
  int device = 0;
  cuda::Stream stream = nullptr;
  bool pooled = false;
  std::vector<cuda::Stream> users;  // other streams that use the memory (record_stream)
};

struct Usage {
  uint64_t current = 0;
  uint64_t peak = 0;
};

struct State {
  std::mutex mutex;
  trace::File file;
  std::unordered_map<void*, Live> live;
  Usage usage[device_memory::kDevices];
  uint64_t unknown_frees = 0;
  bool throws = false;

  void add(void* pointer, Live block) {
    Live& entry = live[pointer];
    usage[entry.device].current -= entry.bytes;  // not 0 only if an earlier free of this address was not seen
    Usage& device_usage = usage[block.device];
    device_usage.current += block.bytes;
    if (device_usage.current > device_usage.peak) device_usage.peak = device_usage.current;
    entry = std::move(block);
  }
};

State& state() {
  static State& instance = *new State;  // never destroyed: PyTorch frees memory during process exit
  return instance;
}

thread_local bool in_cuda_call = false;

class CudaCallScope {
 public:
  CudaCallScope() { in_cuda_call = true; }
  ~CudaCallScope() { in_cuda_call = false; }
};

uint64_t number(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer); }

void before_fork() { state().mutex.lock(); }
void parent_after_fork() { state().mutex.unlock(); }
void child_after_fork() {
  state().file.abandon();
  state().mutex.unlock();
}

__attribute__((constructor)) void on_load() { pthread_atfork(before_fork, parent_after_fork, child_after_fork); }

// If a process exits without hook_close, its trace has all records except the end record.
__attribute__((destructor)) void on_exit() {
  std::lock_guard<std::mutex> lock(state().mutex);
  state().file.flush();
}

void throw_out_of_memory(uint64_t bytes, int device, const char* reason) {
  throw std::runtime_error("CUDA out of memory: the allocator hook cannot allocate " + std::to_string(bytes) + " bytes on device " +
                           std::to_string(device) + ": " + reason);
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

// ---- Functions called by PyTorch ----

void* hook_malloc(ssize_t size, int device, cuda::Stream stream) {
  if (size <= 0) return nullptr;
  const auto bytes = static_cast<uint64_t>(size);
  const bool usable = cuda::runtime().error.empty() && device_memory::is_device(device);
  if (usable && in_cuda_call) return device_memory::allocate(bytes, device, stream).pointer;
  device_memory::Block block;
  if (usable) {
    CudaCallScope scope;
    block = device_memory::allocate(bytes, device, stream);
  }
  State& s = state();
  std::unique_lock<std::mutex> lock(s.mutex);
  if (block.pointer != nullptr) {
    s.add(block.pointer, Live{bytes, device, stream, block.pooled, {}});
    s.file.append(trace::ALLOCATION, 0, device, number(block.pointer), bytes, number(stream), 0);
    return block.pointer;
  }
  s.file.append(trace::FAILED_ALLOCATION, 0, device, 0, bytes, number(stream), 0);
  s.file.flush();  // the process may end soon
  const bool throws = s.throws;
  lock.unlock();
  if (throws)
    throw_out_of_memory(bytes, device, usable ? "not enough free GPU memory" : "there is no CUDA runtime or no such device");
  return nullptr;
}

void hook_free(void* pointer, ssize_t, int device, cuda::Stream stream) {
  if (pointer == nullptr || !cuda::runtime().error.empty() || !device_memory::is_device(device)) return;
  if (in_cuda_call) return device_memory::release({pointer, false}, device, stream, {});
  Live block;
  block.device = device;
  {
    State& s = state();
    std::lock_guard<std::mutex> lock(s.mutex);
    const auto found = s.live.find(pointer);
    if (found != s.live.end()) {
      block = std::move(found->second);
      s.live.erase(found);
      s.usage[block.device].current -= block.bytes;
    } else {
      ++s.unknown_frees;  // a double free, or memory that was not allocated here: CUDA handles it
    }
    s.file.append(trace::FREE, 0, block.device, number(pointer), 0, number(stream), 0);
  }
  CudaCallScope scope;
  device_memory::release({pointer, block.pooled}, block.device, stream, block.users);
}

// Marks the memory as used by `stream` too. A later free waits for the work submitted to `stream`.
void hook_record_stream(void* pointer, cuda::Stream stream) {
  State& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  const auto found = s.live.find(pointer);
  if (found == s.live.end() || found->second.stream == stream) return;
  std::vector<cuda::Stream>& users = found->second.users;
  if (std::find(users.begin(), users.end(), stream) == users.end()) users.push_back(stream);
}

// ---- Functions called by library.py ----

// Starts a trace. Its first records are the live allocations. Returns 0 or an errno; EBUSY if another trace is open.
int hook_open(const char* path, const char* header) {
  State& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  if (s.file.is_open()) return EBUSY;
  const int error = s.file.open(path, header);
  for (const auto& [pointer, block] : s.live)
    s.file.append(trace::ALLOCATION, 0, block.device, number(pointer), block.bytes, number(block.stream), 0);
  return error;
}

// Phases have the numbers of FORMAT.md. A microbatch or iteration of -1 means none.
void hook_mark(int entered, const char* name, int phase, int64_t microbatch, int64_t iteration) {
  State& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  const uint32_t text = s.file.text(name);
  s.file.append(entered ? trace::ENTER : trace::LEAVE, static_cast<uint8_t>(phase), 0, static_cast<uint64_t>(microbatch),
                static_cast<uint64_t>(iteration), 0, text);
}

void hook_collective(const char* description, uint64_t bytes) {
  State& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  const uint32_t text = s.file.text(description);
  s.file.append(trace::COLLECTIVE, 0, 0, 0, bytes, 0, text);
}

void hook_label(uint64_t pointer, uint64_t bytes, const char* description) {
  State& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  const uint32_t text = s.file.text(description);
  s.file.append(trace::LABEL, 0, 0, pointer, bytes, 0, text);
}

void hook_flush() {
  State& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  s.file.flush();
}

// Ends the trace; the allocator continues to work. Returns 0 or an errno.
int hook_close() {
  State& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  return s.file.close();
}

int hook_is_recording() {
  State& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  return s.file.is_open() ? 1 : 0;
}

uint64_t hook_current_bytes(int device) {
  if (!device_memory::is_device(device)) return 0;
  State& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  return s.usage[device].current;
}

uint64_t hook_peak_bytes(int device) {
  if (!device_memory::is_device(device)) return 0;
  State& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  return s.usage[device].peak;
}

void hook_reset_peak(int device) {
  if (!device_memory::is_device(device)) return;
  State& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  s.usage[device].peak = s.usage[device].current;
}

uint64_t hook_unknown_frees() {
  State& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  return s.unknown_frees;
}

// 0: from CUDA's memory pool if the driver supports it. 1: always cudaMalloc.
void hook_set_mode(int mode) { device_memory::set_mode(static_cast<device_memory::Mode>(mode)); }

int hook_uses_pool(int device) {
  return cuda::runtime().error.empty() && device_memory::is_device(device) && device_memory::uses_pool(device) ? 1 : 0;
}

// Sets whether a failed allocation throws a C++ exception (a RuntimeError in Python) or returns a null pointer, which PyTorch
// does not check.
void hook_set_throws(int throws) {
  State& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  s.throws = throws != 0;
}

// Returns why the CUDA runtime cannot be used; an empty string if it can.
const char* hook_runtime_error() { return cuda::runtime().error.c_str(); }
}
#pragma GCC visibility pop
