// Functions of the C library that open files themselves: streams, temporary files, semaphores and shared memory.

#include "common.h"
#include <semaphore.h>
#include <spawn.h>
#include <sys/mman.h>

#pragma GCC visibility push(default)

static int flags_of(const char* mode) {
  int flags = *mode == 'r' ? O_RDONLY : *mode == 'w' ? O_WRONLY | O_CREAT | O_TRUNC : O_WRONLY | O_CREAT | O_APPEND;
  for (const char* each = mode + 1; *each != '\0' && *each != ','; each++) {
    if (*each == '+') flags = (flags & ~O_ACCMODE) | O_RDWR;
    if (*each == 'x') flags |= O_EXCL;
    if (*each == 'e') flags |= O_CLOEXEC;
  }
  return flags;
}

static bool is_mode(const char* mode) { return mode != NULL && (*mode == 'r' || *mode == 'w' || *mode == 'a'); }

FILE* fopen(const char* path, const char* mode) {
  if (!protects || !is_mode(mode) || (flags_of(mode) == O_RDONLY && !has_changes())) return NEXT(fopen)(path, mode);
  int descriptor = overlay_open(AT_FDCWD, path, flags_of(mode), 0666);
  if (descriptor < 0) return NULL;
  FILE* opened = fdopen(descriptor, mode);
  if (opened == NULL) KERNEL(SYS_close, descriptor);
  return opened;
}
ALIAS(fopen64, fopen);

FILE* freopen(const char* path, const char* mode, FILE* stream) {
  char name[64];
  if (!protects || path == NULL || !is_mode(mode)) return NEXT(freopen)(path, mode, stream);
  int descriptor = overlay_open(AT_FDCWD, path, flags_of(mode), 0666);
  if (descriptor < 0) {
    int error = errno;
    fclose(stream);
    errno = error;
    return NULL;
  }
  FILE* opened = stream;
  if ((flags_of(mode) & O_ACCMODE) != O_RDONLY && is_foreign(descriptor)) {
    fflush(stream);
    dup2(descriptor, fileno(stream));
  } else {
    snprintf(name, sizeof name, "/proc/self/fd/%d", descriptor);
    opened = NEXT(freopen)(name, mode, stream);
  }
  KERNEL(SYS_close, descriptor);
  return opened;
}
ALIAS(freopen64, freopen);

FILE* tmpfile(void) {
  char name[PATH_MAX];
  if (!protects) return NEXT(tmpfile)();
  if (!run_file(name, ".")) return NULL;
  int descriptor = (int)KERNEL(SYS_openat, AT_FDCWD, name, O_TMPFILE | O_RDWR | O_EXCL, 0600);
  return descriptor < 0 ? NEXT(tmpfile)() : fdopen(descriptor, "w+");
}
ALIAS(tmpfile64, tmpfile);

// Replaces the X in front of `suffix` characters. Tries `make` until the name is free.
static int make_unique(char* template, int suffix, int flags, int (*make)(const char*, int)) {
  static const char letters[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789";
  size_t length = strlen(template);
  if (suffix < 0 || length < 6 + (size_t)suffix) return fail(EINVAL);
  char* marks = template + length - 6 - (size_t)suffix;
  if (strncmp(marks, "XXXXXX", 6) != 0) return fail(EINVAL);
  int before = errno;
  for (int attempt = 0; attempt < 10000; attempt++) {
    unsigned char bytes[6];
    if (KERNEL(SYS_getrandom, bytes, sizeof bytes, 0) != sizeof bytes) return -1;
    for (int i = 0; i < 6; i++) marks[i] = letters[bytes[i] % (sizeof letters - 1)];
    int result = make(template, flags);
    if (result >= 0) {
      errno = before;
      return result;
    }
    if (errno != EEXIST) return -1;
  }
  return -1;
}

static int make_file(const char* path, int flags) { return overlay_open(AT_FDCWD, path, flags | O_RDWR | O_CREAT | O_EXCL, 0600); }
static int make_folder(const char* path, int flags) { return (void)flags, mkdir(path, 0700); }
static int make_nothing(const char* path, int flags) {
  struct stat status;
  (void)flags;
  if (lstat(path, &status) == 0) return fail(EEXIST);
  return errno == ENOENT ? 0 : -1;
}

int mkostemps(char* template, int suffix, int flags) {
  if (!protects) return NEXT(mkostemps)(template, suffix, flags);
  return make_unique(template, suffix, flags & ~O_ACCMODE, make_file);
}
ALIAS(mkostemps64, mkostemps);
int mkstemps(char* template, int suffix) { return mkostemps(template, suffix, 0); }
ALIAS(mkstemps64, mkstemps);
int mkostemp(char* template, int flags) { return mkostemps(template, 0, flags); }
ALIAS(mkostemp64, mkostemp);
int mkstemp(char* template) { return mkostemps(template, 0, 0); }
ALIAS(mkstemp64, mkstemp);
char* mkdtemp(char* template) {
  if (!protects) return NEXT(mkdtemp)(template);
  return make_unique(template, 0, 0, make_folder) < 0 ? NULL : template;
}
char* mktemp(char* template) {
  if (!protects) {
    char* (*real)(char*) = (char* (*)(char*))(uintptr_t)next_function("mktemp");
    return real(template);
  }
  if (make_unique(template, 0, 0, make_nothing) < 0) *template = '\0';
  return template;
}

// ---- shared memory and semaphores, which are files in /dev/shm

static bool shared_path(const char* kind, const char* name, char* path) {
  while (*name == '/') name++;
  if (*name == '\0' || strchr(name, '/') != NULL || strlen(name) > NAME_MAX - 4) return fail(EINVAL) == 0;
  return snprintf(path, PATH_MAX, "/dev/shm/%s%s", kind, name) < PATH_MAX;
}

int shm_open(const char* name, int flags, mode_t mode) {
  char path[PATH_MAX];
  if (!protects) return NEXT(shm_open)(name, flags, mode);
  return shared_path("", name, path) ? overlay_open(AT_FDCWD, path, flags | O_CLOEXEC | O_NOFOLLOW, mode) : -1;
}
int shm_unlink(const char* name) {
  char path[PATH_MAX];
  if (!protects) return NEXT(shm_unlink)(name);
  return shared_path("", name, path) ? overlay_unlink(AT_FDCWD, path, 0) : -1;
}

static sem_t* map_semaphore(int descriptor, unsigned value) {
  struct stat status;
  if (KERNEL(SYS_fstat, descriptor, &status) < 0) return SEM_FAILED;
  bool fresh = status.st_size < (off_t)sizeof(sem_t);
  if (fresh && KERNEL(SYS_ftruncate, descriptor, sizeof(sem_t)) < 0) return SEM_FAILED;
  sem_t* mapped = mmap(NULL, sizeof(sem_t), PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  if (mapped == MAP_FAILED) return SEM_FAILED;
  if (fresh) sem_init(mapped, 1, value);
  return mapped;
}

sem_t* sem_open(const char* name, int flags, ...) {
  char path[PATH_MAX];
  va_list rest;
  va_start(rest, flags);
  mode_t mode = flags & O_CREAT ? va_arg(rest, mode_t) : 0;
  unsigned value = flags & O_CREAT ? va_arg(rest, unsigned) : 0;
  va_end(rest);
  if (!protects) return NEXT(sem_open)(name, flags, mode, value);
  if (!shared_path("sem.", name, path)) return SEM_FAILED;
  int descriptor = overlay_open(AT_FDCWD, path, O_RDWR | O_CLOEXEC | (flags & (O_CREAT | O_EXCL)), mode);
  if (descriptor < 0) return SEM_FAILED;
  sem_t* mapped = map_semaphore(descriptor, value);
  KERNEL(SYS_close, descriptor);
  return mapped;
}
int sem_close(sem_t* semaphore) { return protects ? munmap(semaphore, sizeof(sem_t)) : NEXT(sem_close)(semaphore); }
int sem_unlink(const char* name) {
  char path[PATH_MAX];
  if (!protects) return NEXT(sem_unlink)(name);
  return shared_path("sem.", name, path) ? overlay_unlink(AT_FDCWD, path, 0) : -1;
}

// ---- files that the C library opens in a new process

int posix_spawn_file_actions_addopen(posix_spawn_file_actions_t* actions, int descriptor, const char* path, int flags,
                                     mode_t mode) {
  place found;
  if (!protects) return NEXT(posix_spawn_file_actions_addopen)(actions, descriptor, path, flags, mode);
  int before = errno, opened = overlay_open(AT_FDCWD, path, flags | O_CLOEXEC | O_NONBLOCK, mode);
  int error = errno;
  errno = before;
  if (opened < 0) return error;
  bool foreign = (flags & O_ACCMODE) != O_RDONLY && is_foreign(opened);
  KERNEL(SYS_close, opened);
  if (resolve(AT_FDCWD, path, true, &found) < 0) return errno;
  const char* real = foreign ? "/dev/null" : found.layer == MAGIC ? found.path : found.real;
  return NEXT(posix_spawn_file_actions_addopen)(actions, descriptor, real, flags & ~(O_EXCL | O_CREAT), mode);
}
int posix_spawn_file_actions_addchdir_np(posix_spawn_file_actions_t* actions, const char* path) {
  place found;
  if (!protects || resolve(AT_FDCWD, path, true, &found) < 0 || found.layer == MISSING)
    return NEXT(posix_spawn_file_actions_addchdir_np)(actions, path);
  return NEXT(posix_spawn_file_actions_addchdir_np)(actions, found.merged ? found.path : found.real);
}
