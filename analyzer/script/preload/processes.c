// Functions that act on other processes and on the machine. A process is one of the run if its environment names the folder of the
// run. A signal to another process is not sent, and the sender sees a success.

#include "common.h"
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <sys/ipc.h>
#include <sys/mount.h>
#include <sys/msg.h>
#include <sys/ptrace.h>
#include <sys/reboot.h>
#include <sys/resource.h>
#include <sys/sem.h>
#include <sys/shm.h>
#include <sys/swap.h>
#include <sys/time.h>
#include <sys/timex.h>
#include <sys/uio.h>
#include <syslog.h>
#include <time.h>

#define VARIABLE "INFO_SCRIPT_FOLDER="

// Whether the environment of a process names the run, or cannot be read: it is empty while the process starts a program.
typedef enum { OTHER, OF_RUN, EMPTY } owner;

// Searches the environment of a process in pieces, each of which starts with the end of the one before it.
static owner owner_of(int descriptor) {
  char wanted[PATH_MAX + 32], buffer[3 * PATH_MAX];
  size_t length = (size_t)snprintf(wanted, sizeof wanted, VARIABLE "%s", run_folder) + 1;
  size_t used = 1;
  owner found = EMPTY;
  buffer[0] = '\0';
  for (ssize_t size; (size = KERNEL(SYS_read, descriptor, buffer + used, sizeof buffer - used)) > 0;) {
    used += (size_t)size;
    found = OTHER;
    for (char* each = buffer; (each = memchr(each, '\0', (size_t)(buffer + used - each))) != NULL;) {
      each++;
      if ((size_t)(buffer + used - each) >= length && memcmp(each, wanted, length) == 0) return OF_RUN;
    }
    size_t kept = used < length ? used : length;
    memmove(buffer, buffer + used - kept, kept);
    used = kept;
  }
  return found;
}

// Opens a file of a process in /proc; -1 if there is none.
static int open_of(pid_t process, const char* name) {
  char path[64];
  snprintf(path, sizeof path, "/proc/%ld/%s", (long)process, name);
  return (int)KERNEL(SYS_openat, AT_FDCWD, path, O_RDONLY | O_CLOEXEC);
}

// The process that started another one; 0 if it is not known.
static pid_t parent_of(pid_t process) {
  char text[512];
  int descriptor = open_of(process, "stat");
  if (descriptor < 0) return 0;
  ssize_t size = KERNEL(SYS_read, descriptor, text, sizeof text - 1);
  KERNEL(SYS_close, descriptor);
  text[size > 0 ? size : 0] = '\0';
  const char* name = strrchr(text, ')');  // after it: a space, the state, a space and the parent
  return name != NULL && strlen(name) > 4 ? (pid_t)strtol(name + 4, NULL, 10) : 0;
}

bool is_of_run(pid_t process) {
  int before = errno;
  owner found = EMPTY;
  while (process > 1 && process != getpid()) {
    int descriptor = open_of(process, "environ");
    found = descriptor < 0 ? OTHER : owner_of(descriptor);
    if (descriptor >= 0) KERNEL(SYS_close, descriptor);
    if (found != EMPTY) break;
    process = parent_of(process);  // a process that starts a program is of the run if its parent is
  }
  errno = before;
  return found == OF_RUN || process == getpid();
}

static pid_t group_of(pid_t process) {
  int before = errno;
  pid_t group = (pid_t)KERNEL(SYS_getpgid, process);
  errno = before;
  return group;
}

// Whether a signal may be sent to a process, or a change made to it; sets errno to ESRCH if there is no such process.
static bool may_act(pid_t process) { return process == 0 || process == (pid_t)KERNEL(SYS_gettid) || is_of_run(process); }

static int exists(pid_t process) {
  int before = errno;
  if (KERNEL(SYS_kill, process, 0) == 0) return 0;
  if (errno == ESRCH) return -1;
  errno = before;
  return 0;
}

typedef struct {
  pid_t group;  // 0 for all processes
  int number;
} order;

static bool signal_entry(int descriptor, const char* name, void* data) {
  const order* sent = data;
  pid_t process = (pid_t)strtol(name, NULL, 10);
  (void)descriptor;
  if (process <= 1) return true;
  if (sent->group == 0 && process == getpid()) return true;
  if (sent->group != 0 && (process == getpid() || group_of(process) != sent->group)) return true;
  if (is_of_run(process)) KERNEL(SYS_kill, process, sent->number);
  return true;
}

// Sends the signal to the processes of the run in a group, and to this one last.
static int signal_group(pid_t group, int number) {
  order sent = {group, number};
  int before = errno;
  int descriptor = (int)KERNEL(SYS_openat, AT_FDCWD, "/proc", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (descriptor >= 0) {
    each_entry(descriptor, signal_entry, &sent);
    KERNEL(SYS_close, descriptor);
  }
  if (group != 0 && group_of(0) == group) KERNEL(SYS_kill, getpid(), number);
  errno = before;
  return 0;
}

#pragma GCC visibility push(default)

int kill(pid_t process, int number) {
  if (!protects || number == 0) return (int)KERNEL(SYS_kill, process, number);
  if (number < 0 || number > 64) return fail(EINVAL);
  if (process == -1) return signal_group(0, number);
  if (process == 0) return signal_group(group_of(0), number);
  if (exists(process) < 0) return -1;
  if (process < 0) return signal_group(-process, number);
  return is_of_run(process) ? (int)KERNEL(SYS_kill, process, number) : 0;
}

int killpg(pid_t group, int number) {
  if (group < 0) return fail(EINVAL);
  return kill(group == 0 ? 0 : -group, number);
}

int tgkill(pid_t process, pid_t thread, int number) {
  if (protects && number != 0 && !is_of_run(process)) return exists(process);
  return (int)KERNEL(SYS_tgkill, process, thread, number);
}

int sigqueue(pid_t process, int number, const union sigval value) {
  if (protects && number != 0 && !is_of_run(process)) return exists(process);
  return NEXT(sigqueue)(process, number, value);
}

static bool may_signal_handle(int handle) {
  char path[64], text[1024];
  snprintf(path, sizeof path, "/proc/self/fdinfo/%d", handle);
  int descriptor = (int)KERNEL(SYS_openat, AT_FDCWD, path, O_RDONLY | O_CLOEXEC);
  if (descriptor < 0) return false;
  ssize_t size = KERNEL(SYS_read, descriptor, text, sizeof text - 1);
  KERNEL(SYS_close, descriptor);
  text[size > 0 ? size : 0] = '\0';
  const char* found = strstr(text, "\nPid:");
  return found != NULL && is_of_run((pid_t)strtol(found + 5, NULL, 10));
}

int pidfd_send_signal(int handle, int number, siginfo_t* details, unsigned flags) {
  if (protects && number != 0 && !may_signal_handle(handle)) return 0;
  return (int)KERNEL(SYS_pidfd_send_signal, handle, number, details, flags);
}

int setpriority(__priority_which_t which, id_t who, int priority) {
  if (protects && who != 0 && (which != PRIO_PROCESS || !may_act((pid_t)who))) return 0;
  return (int)KERNEL(SYS_setpriority, which, who, priority);
}
int sched_setaffinity(pid_t process, size_t size, const cpu_set_t* set) {
  if (protects && !may_act(process)) return exists(process);
  return NEXT(sched_setaffinity)(process, size, set);
}
int sched_setscheduler(pid_t process, int policy, const struct sched_param* values) {
  if (protects && !may_act(process)) return exists(process);
  return NEXT(sched_setscheduler)(process, policy, values);
}
int sched_setparam(pid_t process, const struct sched_param* values) {
  if (protects && !may_act(process)) return exists(process);
  return NEXT(sched_setparam)(process, values);
}
int prlimit(pid_t process, __rlimit_resource_t resource, const struct rlimit* fresh, struct rlimit* old) {
  if (protects && fresh != NULL && !may_act(process)) return exists(process);
  return (int)KERNEL(SYS_prlimit64, process, resource, fresh, old);
}
int prlimit64(pid_t process, __rlimit_resource_t resource, const struct rlimit64* fresh, struct rlimit64* old) {
  return prlimit(process, resource, (const struct rlimit*)fresh, (struct rlimit*)old);
}

long ptrace(enum __ptrace_request request, ...) {
  va_list rest;
  va_start(rest, request);
  pid_t process = va_arg(rest, pid_t);
  void* address = va_arg(rest, void*);
  void* data = va_arg(rest, void*);
  va_end(rest);
  if (protects && (request == PTRACE_ATTACH || request == PTRACE_SEIZE) && !is_of_run(process)) return fail(EPERM);
  return NEXT(ptrace)(request, process, address, data);
}
ssize_t process_vm_writev(pid_t process, const struct iovec* own, unsigned long count, const struct iovec* other,
                          unsigned long others, unsigned long flags) {
  if (protects && !is_of_run(process)) return fail(EPERM);
  return KERNEL(SYS_process_vm_writev, process, own, count, other, others, flags);
}

// ---- objects of System V, which outlast the run: those of the run may be removed

static int note_object(const char* kind, int number, bool fresh) {
  char name[64];
  if (number < 0 || !fresh) return number;
  snprintf(name, sizeof name, "%s%d", kind, number);
  note("objects", name);
  return number;
}

static bool is_object(const char* kind, int number) {
  char name[64];
  snprintf(name, sizeof name, "%s%d", kind, number);
  return is_noted("objects", name);
}

static bool is_missing(int found) { return found < 0 && errno == ENOENT; }

int shmget(key_t key, size_t size, int flags) {
  if (!protects) return NEXT(shmget)(key, size, flags);
  int before = errno;
  bool fresh = key == IPC_PRIVATE || (flags & IPC_CREAT && is_missing(NEXT(shmget)(key, 0, 0)));
  errno = before;
  return note_object("shm", NEXT(shmget)(key, size, flags), fresh);
}
int semget(key_t key, int number, int flags) {
  if (!protects) return NEXT(semget)(key, number, flags);
  int before = errno;
  bool fresh = key == IPC_PRIVATE || (flags & IPC_CREAT && is_missing(NEXT(semget)(key, 0, 0)));
  errno = before;
  return note_object("sem", NEXT(semget)(key, number, flags), fresh);
}
int msgget(key_t key, int flags) {
  if (!protects) return NEXT(msgget)(key, flags);
  int before = errno;
  bool fresh = key == IPC_PRIVATE || (flags & IPC_CREAT && is_missing(NEXT(msgget)(key, 0)));
  errno = before;
  return note_object("msg", NEXT(msgget)(key, flags), fresh);
}

static bool changes_object(int command) {
  return command == IPC_RMID || command == IPC_SET || command == SETVAL || command == SETALL;
}

int shmctl(int number, int command, struct shmid_ds* values) {
  if (protects && (command == IPC_RMID || command == IPC_SET) && !is_object("shm", number)) return 0;
  return NEXT(shmctl)(number, command, values);
}
int semctl(int number, int index, int command, ...) {
  va_list rest;
  va_start(rest, command);
  void* value = va_arg(rest, void*);  // all members of the union have this size or less
  va_end(rest);
  if (protects && changes_object(command) && !is_object("sem", number)) return 0;
  return NEXT(semctl)(number, index, command, value);
}
int msgctl(int number, int command, struct msqid_ds* values) {
  if (protects && (command == IPC_RMID || command == IPC_SET) && !is_object("msg", number)) return 0;
  return NEXT(msgctl)(number, command, values);
}

// Queues of messages. All of them are the user's, because the run makes none: the kernel would make a queue before Landlock refuses
// to open it.
int mq_open(const char* name, int flags, ...) {
  va_list rest;
  va_start(rest, flags);
  mode_t mode = va_arg(rest, mode_t);
  void* values = va_arg(rest, void*);
  va_end(rest);
  if (protects && flags & O_CREAT) return fail(EACCES);
  int (*real)(const char*, int, ...) = (int (*)(const char*, int, ...))(uintptr_t)next_function("mq_open");
  return real == NULL ? fail(ENOSYS) : real(name, flags, mode, values);
}
int mq_unlink(const char* name) {
  if (protects) return 0;
  int (*real)(const char*) = (int (*)(const char*))(uintptr_t)next_function("mq_unlink");
  return real == NULL ? fail(ENOSYS) : real(name);
}

// ---- the machine

int reboot(int command) { return protects ? fail(EPERM) : NEXT(reboot)(command); }
int mount(const char* source, const char* target, const char* kind, unsigned long flags, const void* data) {
  return protects ? fail(EPERM) : (int)KERNEL(SYS_mount, source, target, kind, flags, data);
}
int umount2(const char* target, int flags) { return protects ? fail(EPERM) : (int)KERNEL(SYS_umount2, target, flags); }
int umount(const char* target) { return umount2(target, 0); }
int swapon(const char* path, int flags) { return protects ? fail(EPERM) : (int)KERNEL(SYS_swapon, path, flags); }
int swapoff(const char* path) { return protects ? fail(EPERM) : (int)KERNEL(SYS_swapoff, path); }
int sethostname(const char* name, size_t size) { return protects ? fail(EPERM) : (int)KERNEL(SYS_sethostname, name, size); }
int setdomainname(const char* name, size_t size) { return protects ? fail(EPERM) : (int)KERNEL(SYS_setdomainname, name, size); }
int settimeofday(const struct timeval* time, const struct timezone* zone) {
  return protects ? fail(EPERM) : NEXT(settimeofday)(time, zone);
}
int clock_settime(clockid_t clock, const struct timespec* time) {
  return protects ? fail(EPERM) : NEXT(clock_settime)(clock, time);
}
int adjtime(const struct timeval* delta, struct timeval* old) {
  return protects && delta != NULL ? fail(EPERM) : NEXT(adjtime)(delta, old);
}
int adjtimex(struct timex* values) { return protects && values->modes != 0 ? fail(EPERM) : NEXT(adjtimex)(values); }
int clock_adjtime(clockid_t clock, struct timex* values) {
  return protects && values->modes != 0 ? fail(EPERM) : (int)KERNEL(SYS_clock_adjtime, clock, values);
}
int init_module(void* image, unsigned long size, const char* values) {
  return protects ? fail(EPERM) : (int)KERNEL(SYS_init_module, image, size, values);
}
int finit_module(int descriptor, const char* values, int flags) {
  return protects ? fail(EPERM) : (int)KERNEL(SYS_finit_module, descriptor, values, flags);
}
int delete_module(const char* name, unsigned flags) { return protects ? fail(EPERM) : (int)KERNEL(SYS_delete_module, name, flags); }

int ioctl(int descriptor, unsigned long request, ...) {
  va_list rest;
  va_start(rest, request);
  void* value = va_arg(rest, void*);
  va_end(rest);
  uint32_t code = (uint32_t)request;
  bool types_input = code == 0x5412;                                                 // TIOCSTI
  bool sets_flags = code == 0x40086602 || code == 0x40046602 || code == 0x401c5820;  // FS_IOC_SETFLAGS, FS_IOC_FSSETXATTR
  if (protects && types_input) return fail(EPERM);
  if (protects && sets_flags && is_foreign(descriptor)) return 0;
  return (int)KERNEL(SYS_ioctl, descriptor, request, value);
}

// The log of the system is not written.
void syslog(int priority, const char* format, ...) {
  va_list rest;
  va_start(rest, format);
  if (!protects) NEXT(vsyslog)(priority, format, rest);
  va_end(rest);
}
void vsyslog(int priority, const char* format, va_list rest) {
  if (!protects) NEXT(vsyslog)(priority, format, rest);
}
void __syslog_chk(int priority, int flag, const char* format, ...) {
  va_list rest;
  (void)flag;
  va_start(rest, format);
  if (!protects) NEXT(vsyslog)(priority, format, rest);
  va_end(rest);
}
void __vsyslog_chk(int priority, int flag, const char* format, va_list rest) {
  (void)flag;
  if (!protects) NEXT(vsyslog)(priority, format, rest);
}
