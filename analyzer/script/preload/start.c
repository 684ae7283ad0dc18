// Reads the variables of the run, and calls the kernel.

#include "common.h"

char run_folder[PATH_MAX];
char own_library[PATH_MAX];
bool protects;

static void read_variable(const char* name, char* target) {
  const char* value = getenv(name);
  if (value != NULL && strlen(value) < PATH_MAX) strcpy(target, value);
}

__attribute__((constructor)) static void start(void) {
  read_variable("INFO_SCRIPT_FOLDER", run_folder);
  read_variable("INFO_SCRIPT_PRELOAD", own_library);
  const char* value = getenv("INFO_SCRIPT_PROTECT");
  if (value == NULL || strcmp(value, "1") != 0 || run_folder[0] != '/') return;
  char target[PATH_MAX];
  if (!run_file(target, "upper")) return;
  int before = errno;
  KERNEL(SYS_mkdirat, AT_FDCWD, target, 0755);
  errno = before;
  protects = true;
}

#if defined(__x86_64__)
long call_kernel(long number, long a, long b, long c, long d, long e, long f) {
  register long r10 __asm__("r10") = d;
  register long r8 __asm__("r8") = e;
  register long r9 __asm__("r9") = f;
  long result;
  __asm__ volatile("syscall"
                   : "=a"(result)
                   : "a"(number), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9)
                   : "rcx", "r11", "memory");
  if (result > -4096 && result < 0) return fail((int)-result);
  return result;
}
#elif defined(__aarch64__)
long call_kernel(long number, long a, long b, long c, long d, long e, long f) {
  register long x8 __asm__("x8") = number;
  register long x0 __asm__("x0") = a;
  register long x1 __asm__("x1") = b;
  register long x2 __asm__("x2") = c;
  register long x3 __asm__("x3") = d;
  register long x4 __asm__("x4") = e;
  register long x5 __asm__("x5") = f;
  __asm__ volatile("svc 0" : "+r"(x0) : "r"(x8), "r"(x1), "r"(x2), "r"(x3), "r"(x4), "r"(x5) : "memory");
  if (x0 > -4096 && x0 < 0) return fail((int)-x0);
  return x0;
}
#else
#error "no system calls for this machine"
#endif

void* next_function(const char* name) { return dlsym(RTLD_NEXT, name); }

int fail(int error) {
  errno = error;
  return -1;
}

bool is_below(const char* path, const char* folder_path) {
  size_t length = strlen(folder_path);
  return strncmp(path, folder_path, length) == 0 && (path[length] == '\0' || path[length] == '/');
}

bool run_file(char* target, const char* name) { return snprintf(target, PATH_MAX, "%s/%s", run_folder, name) < PATH_MAX; }

static bool noted_file(char* target, const char* kind, const char* name) {
  return snprintf(target, PATH_MAX, "%s/%s/%s", run_folder, kind, name) < PATH_MAX;
}

void note(const char* kind, const char* name) {
  char target[PATH_MAX];
  int before = errno;
  if (run_file(target, kind)) KERNEL(SYS_mkdirat, AT_FDCWD, target, 0700);
  if (noted_file(target, kind, name)) {
    int descriptor = (int)KERNEL(SYS_openat, AT_FDCWD, target, O_CREAT | O_WRONLY | O_CLOEXEC, 0600);
    if (descriptor >= 0) KERNEL(SYS_close, descriptor);
  }
  errno = before;
}

bool is_noted(const char* kind, const char* name) {
  char target[PATH_MAX];
  int before = errno;
  bool found = noted_file(target, kind, name) && KERNEL(SYS_faccessat, AT_FDCWD, target, F_OK) == 0;
  errno = before;
  return found;
}
