// The allocator that PyTorch calls through torch.cuda.memory.CUDAPluggableAllocator, and the recorder of what it is asked for.
//
// Rules that everything here keeps:
// - A free is recorded before it happens, and an allocation after: the address may be handed out again in between, and the trace
//   must never show it twice.
// - No lock is held during a CUDA call. One mutex guards the trace and the accounts, and is held for a copy of 48 bytes, or for the
//   write of a full block.
// - A thread inside one of our CUDA calls is not recorded again.
// - A child after fork does not record: the file belongs to its parent. It may open one of its own.

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
  std::vector<cuda::Stream> users;  // other streams that were told of this memory
};

struct Account {
  uint64_t current = 0;
  uint64_t peak = 0;
};

struct State {
  std::mutex mutex;
  trace::File file;
  std::unordered_map<void*, Live> live;
  Account accounts[device_memory::kDevices];
  uint64_t unknown_frees = 0;
  bool throws = false;

  void take(void* pointer, Live block) {
    Live& place = live[pointer];
    accounts[place.device].current -= place.bytes;  // not zero only where the free of that address never came by
    Account& account = accounts[block.device];
    account.current += block.bytes;
    if (account.current > account.peak) account.peak = account.current;
    place = std::move(block);
  }
};

State& state() {
  static State& only = *new State;  // never destroyed: PyTorch frees memory until the process is gone
  return only;
}

thread_local bool inside = false;

class Inside {
 public:
  Inside() { inside = true; }
  ~Inside() { inside = false; }
};

uint64_t number(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer); }

void before_fork() { state().mutex.lock(); }
void parent_after_fork() { state().mutex.unlock(); }
void child_after_fork() {
  state().file.abandon();
  state().mutex.unlock();
}

__attribute__((constructor)) void on_load() { pthread_atfork(before_fork, parent_after_fork, child_after_fork); }

// A process that ends without hook_close leaves everything it recorded, only not the end record.
__attribute__((destructor)) void on_exit() {
  std::lock_guard<std::mutex> lock(state().mutex);
  state().file.flush();
}

void refuse(uint64_t bytes, int device, const char* why) {
  throw std::runtime_error("CUDA out of memory: the allocator hook was asked for " + std::to_string(bytes) + " bytes on device " +
                           std::to_string(device) + ": " + why);
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

// ---- what PyTorch calls ----

void* hook_malloc(ssize_t size, int device, cuda::Stream stream) {
  if (size <= 0) return nullptr;
  const auto bytes = static_cast<uint64_t>(size);
  const bool usable = cuda::runtime().error.empty() && device_memory::is_device(device);
  if (usable && inside) return device_memory::allocate(bytes, device, stream).pointer;
  device_memory::Block block;
  if (usable) {
    Inside guard;
    block = device_memory::allocate(bytes, device, stream);
  }
  State& s = state();
  std::unique_lock<std::mutex> lock(s.mutex);
  if (block.pointer != nullptr) {
    s.take(block.pointer, Live{bytes, device, stream, block.pooled, {}});
    s.file.append(trace::ALLOCATION, 0, device, number(block.pointer), bytes, number(stream), 0);
    return block.pointer;
  }
  s.file.append(trace::FAILED_ALLOCATION, 0, device, 0, bytes, number(stream), 0);
  s.file.flush();  // the process may not live long
  const bool throws = s.throws;
  lock.unlock();
  if (throws) refuse(bytes, device, usable ? "the GPU has no more" : "there is no CUDA runtime or no such device");
  return nullptr;
}

void hook_free(void* pointer, ssize_t, int device, cuda::Stream stream) {
  if (pointer == nullptr || !cuda::runtime().error.empty() || !device_memory::is_device(device)) return;
  if (inside) return device_memory::release({pointer, false}, device, stream, {});
  Live block;
  block.device = device;
  {
    State& s = state();
    std::lock_guard<std::mutex> lock(s.mutex);
    const auto found = s.live.find(pointer);
    if (found != s.live.end()) {
      block = std::move(found->second);
      s.live.erase(found);
      s.accounts[block.device].current -= block.bytes;
    } else {
      ++s.unknown_frees;  // a second free, or memory that is not ours: CUDA decides, as it would without us
    }
    s.file.append(trace::FREE, 0, block.device, number(pointer), 0, number(stream), 0);
  }
  Inside guard;
  device_memory::release({pointer, block.pooled}, block.device, stream, block.users);
}

// `stream` uses the memory too: it is not to be given back before `stream` has come this far.
void hook_record_stream(void* pointer, cuda::Stream stream) {
  State& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  const auto found = s.live.find(pointer);
  if (found == s.live.end() || found->second.stream == stream) return;
  std::vector<cuda::Stream>& users = found->second.users;
  if (std::find(users.begin(), users.end(), stream) == users.end()) users.push_back(stream);
}

// ---- the control surface ----

// Starts a trace with what is live now. Returns 0 or an errno; EBUSY while another trace is being written.
int hook_open(const char* path, const char* header) {
  State& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  if (s.file.is_open()) return EBUSY;
  const int error = s.file.open(path, header);
  for (const auto& [pointer, block] : s.live)
    s.file.append(trace::ALLOCATION, 0, block.device, number(pointer), block.bytes, number(block.stream), 0);
  return error;
}

// Phases are numbered as in FORMAT.md; -1 for a microbatch or an iteration means none.
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

// Returns 0 or an errno. Memory goes on being handed out and accounted for.
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
  return s.accounts[device].current;
}

uint64_t hook_peak_bytes(int device) {
  if (!device_memory::is_device(device)) return 0;
  State& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  return s.accounts[device].peak;
}

void hook_reset_peak(int device) {
  if (!device_memory::is_device(device)) return;
  State& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  s.accounts[device].peak = s.accounts[device].current;
}

uint64_t hook_unknown_frees() {
  State& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  return s.unknown_frees;
}

// 0: from CUDA's pool where the driver has one. 1: always cudaMalloc.
void hook_set_mode(int mode) { device_memory::set_mode(static_cast<device_memory::Mode>(mode)); }

int hook_uses_pool(int device) {
  return cuda::runtime().error.empty() && device_memory::is_device(device) && device_memory::uses_pool(device) ? 1 : 0;
}

// Whether a failed allocation is a C++ exception, which PyTorch turns into a RuntimeError, or a null pointer, which it does not check.
void hook_set_throws(int throws) {
  State& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  s.throws = throws != 0;
}

// Why there is no CUDA runtime to allocate from; an empty text where there is one.
const char* hook_runtime_error() { return cuda::runtime().error.c_str(); }
}
#pragma GCC visibility pop
