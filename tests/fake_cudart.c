/* A fake CUDA runtime for tests: it returns numbers instead of memory, fails on demand, delays frees, and counts calls.
 * A freed address is reused immediately, even before the free has returned: the worst case of a real runtime. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { SLOTS = 1 << 16, DEVICES = 8 };
static const uintptr_t BASE = 0x700000000000u;
static const int SHIFT = 20;

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static uint64_t sizes[SLOTS];
static int owners[SLOTS];
static int free_slots[SLOTS];
static int free_count, used_slots;
static uint64_t in_use[DEVICES];
static uint64_t capacity = UINT64_MAX;
static uint64_t kept_by_pool;
static int failures_to_come, pools_supported, free_delay_us, last_error;
static __thread int current_device;
static void (*on_call)(const char*, void*);

static struct {
  const char* name;
  int count;
} calls[32];

static void called(const char* name, void* pointer) {
  pthread_mutex_lock(&mutex);
  for (int i = 0; i < 32; ++i) {
    if (calls[i].name == NULL) calls[i].name = name;
    if (strcmp(calls[i].name, name) == 0) {
      ++calls[i].count;
      break;
    }
  }
  pthread_mutex_unlock(&mutex);
  if (on_call) on_call(name, pointer);
}

static int result(int error) {
  if (error) last_error = error;
  return error;
}

static int allocate(void** pointer, size_t size, int device) {
  int error = 0;
  pthread_mutex_lock(&mutex);
  if (failures_to_come > 0) {
    --failures_to_come;
    error = 2;
  } else if (in_use[device] + kept_by_pool + size > capacity)
    error = 2;
  else if (free_count == 0 && used_slots == SLOTS)
    error = 2;
  else {
    int slot = free_count > 0 ? free_slots[--free_count] : used_slots++;
    sizes[slot] = size;
    owners[slot] = device;
    in_use[device] += size;
    *pointer = (void*)(BASE + ((uintptr_t)slot << SHIFT));
  }
  pthread_mutex_unlock(&mutex);
  return result(error);
}

static int release(void* pointer) {
  uintptr_t slot = ((uintptr_t)pointer - BASE) >> SHIFT;
  int error = 0;
  pthread_mutex_lock(&mutex);
  if (slot >= SLOTS || sizes[slot] == 0)
    error = 1;
  else {
    in_use[owners[slot]] -= sizes[slot];
    sizes[slot] = 0;
    free_slots[free_count++] = (int)slot;
  }
  pthread_mutex_unlock(&mutex);
  if (free_delay_us) usleep(free_delay_us);
  return result(error);
}

int cudaMalloc(void** p, size_t n) {
  called("cudaMalloc", NULL);
  return allocate(p, n, current_device);
}
int cudaFree(void* p) {
  called("cudaFree", p);
  return release(p);
}
int cudaGetDevice(int* device) {
  *device = current_device;
  return 0;
}
int cudaSetDevice(int device) {
  called("cudaSetDevice", NULL);
  current_device = device;
  return 0;
}
int cudaGetLastError(void) {
  int error = last_error;
  last_error = 0;
  return error;
}
int cudaDeviceSynchronize(void) {
  called("cudaDeviceSynchronize", NULL);
  return 0;
}
int cudaDeviceGetAttribute(int* value, int attribute, int device) {
  (void)device;
  *value = attribute == 115 && pools_supported;
  return 0;
}
int cudaDeviceGetDefaultMemPool(void** pool, int device) {
  *pool = (void*)(uintptr_t)(device + 1);
  return 0;
}
int cudaMemPoolSetAttribute(void* pool, int attribute, void* value) {
  (void)pool;
  if (attribute == 4 && *(uint64_t*)value == UINT64_MAX) called("keep everything", NULL);
  return 0;
}
int cudaMemPoolTrimTo(void* pool, size_t n) {
  (void)pool;
  (void)n;
  called("cudaMemPoolTrimTo", NULL);
  kept_by_pool = 0;
  return 0;
}
int cudaMallocFromPoolAsync(void** p, size_t n, void* pool, void* stream) {
  (void)stream;
  called("cudaMallocFromPoolAsync", NULL);
  return allocate(p, n, (int)(uintptr_t)pool - 1);
}
int cudaFreeAsync(void* p, void* stream) {
  (void)stream;
  called("cudaFreeAsync", p);
  return release(p);
}
int cudaEventCreateWithFlags(void** event, unsigned flags) {
  (void)flags;
  *event = &mutex;
  return 0;
}
int cudaEventRecord(void* event, void* stream) {
  (void)event;
  called("cudaEventRecord", stream);
  return 0;
}
int cudaEventDestroy(void* event) {
  (void)event;
  return 0;
}
int cudaStreamWaitEvent(void* stream, void* event, unsigned flags) {
  (void)event;
  (void)flags;
  called("cudaStreamWaitEvent", stream);
  return 0;
}

/* Controls for the tests. */
void fake_capacity(uint64_t bytes) { capacity = bytes; }
void fake_fail_next(int count) { failures_to_come = count; }
void fake_pools(int supported) { pools_supported = supported; }
void fake_kept_by_pool(uint64_t bytes) { kept_by_pool = bytes; }
void fake_free_delay_us(int us) { free_delay_us = us; }
void fake_on_call(void (*callback)(const char*, void*)) { on_call = callback; }
uint64_t fake_in_use(int device) { return in_use[device]; }
int fake_last_error(void) { return last_error; }
int fake_calls(const char* name) {
  for (int i = 0; i < 32 && calls[i].name; ++i)
    if (strcmp(calls[i].name, name) == 0) return calls[i].count;
  return 0;
}

/* Threads that allocate and free as fast as possible, each on its own device. */
typedef void* (*malloc_function)(ssize_t, int, void*);
typedef void (*free_function)(void*, ssize_t, int, void*);
struct work {
  malloc_function malloc;
  free_function free;
  int device, rounds;
};

static void* hammer(void* argument) {
  struct work* work = argument;
  enum { HELD = 16 };
  void* held[HELD] = {0};
  unsigned seed = (unsigned)work->device + 1;
  for (int i = 0; i < work->rounds; ++i) {
    int at = rand_r(&seed) % HELD;
    if (held[at]) work->free(held[at], 0, work->device, NULL);
    held[at] = work->malloc(1 + rand_r(&seed) % 1000000, work->device, NULL);
  }
  for (int at = 0; at < HELD; ++at)
    if (held[at]) work->free(held[at], 0, work->device, NULL);
  return NULL;
}

void fake_hammer(malloc_function m, free_function f, int threads, int rounds) {
  pthread_t ids[DEVICES];
  struct work works[DEVICES];
  for (int t = 0; t < threads; ++t) {
    works[t] = (struct work){m, f, t, rounds};
    pthread_create(&ids[t], NULL, hammer, &works[t]);
  }
  for (int t = 0; t < threads; ++t) pthread_join(ids[t], NULL);
}
