// Functions that name files. With INFO_SCRIPT_PROTECT=1 they write to the private copy (overlay.c), and read it first.
//
// Not covered, because these do not call the functions of this library:
//   - programs without the dynamic loader or with another C library, and those that ignore LD_PRELOAD (setuid, unless
//     no_new_privs is set);
//   - system calls that a program makes itself; `syscall` is covered for the calls listed in system_call.c;
//   - io_uring, which is refused where `syscall` sets it up;
//   - calls inside of the C library: ftw, nftw, fts, dlopen, getpwnam, tempnam, catopen, and the commands of popen and system read
//     the files of the user. They change no file, except through functions that are covered.
// Landlock, where the kernel has it, refuses writing for all of these. It does not refuse changes of permissions, owners and times.
//
// Differences from a real file system: a folder of the user cannot be renamed (EXDEV, so that `mv` copies it). Files above 64 MiB
// cannot be opened for writing, unless this truncates them (EROFS). Named pipes and sockets of the user cannot be opened. Changes
// of a device are ignored. Extended attributes and access lists are not copied.

#include "common.h"
#include <sys/statfs.h>
#include <sys/statvfs.h>
#include <sys/sysmacros.h>
#include <sys/time.h>
#include <sys/xattr.h>
#include <utime.h>

#define IS_PLAIN (!protects || !has_changes())
#define LARGE (64 << 20)

static bool writes_file(int flags) {
  if (flags & O_PATH) return false;
  return (flags & O_ACCMODE) != O_RDONLY || (flags & (O_CREAT | O_TRUNC)) || (flags & O_TMPFILE) == O_TMPFILE;
}

static bool is_harmless(const struct stat* device) {
  unsigned major_number = major(device->st_rdev), minor_number = minor(device->st_rdev);
  if (!S_ISCHR(device->st_mode)) return false;
  if (major_number == 1) return minor_number == 3 || minor_number == 5 || (minor_number >= 7 && minor_number <= 9);
  return (major_number == 5 && minor_number != 1) || (major_number >= 136 && major_number <= 143);
}

static int real_open(const char* real, int flags, mode_t mode) { return (int)KERNEL(SYS_openat, AT_FDCWD, real, flags, mode); }

static int open_for_reading(int at, const char* given, int flags) {
  place found;
  if (resolve(at, given, !(flags & O_NOFOLLOW), &found) < 0) return -1;
  if (found.layer == MISSING) return fail(ENOENT);
  if (found.layer == LOWER && S_ISFIFO(found.status.st_mode) && !(flags & O_PATH)) return fail(ENXIO);
  return real_open(found.real, flags, 0);
}

// Opens a file through its descriptor in /proc. A file of the user stays the one that was inherited: it is not truncated.
static int open_descriptor(const place* found, int flags) {
  char target[PATH_MAX], own[64];
  if (S_ISBLK(found->status.st_mode) || (S_ISCHR(found->status.st_mode) && !is_harmless(&found->status))) return fail(EACCES);
  if (read_link(found->path, target) < 0) return -1;
  bool is_file = S_ISREG(found->status.st_mode) || S_ISDIR(found->status.st_mode);
  if (!is_file || is_below(target, run_folder) || strncmp(target, "/memfd:", 7) == 0)
    return real_open(found->path, flags & ~O_CREAT, 0);
  snprintf(own, sizeof own, "/proc/%ld/fd/", (long)getpid());
  if (strncmp(found->path, own, strlen(own)) != 0) return fail(EACCES);
  int number = atoi(found->path + strlen(own));
  int mode = fcntl(number, F_GETFL);
  if (mode < 0 || (mode & O_ACCMODE) == O_RDONLY) return fail(EACCES);
  return fcntl(number, flags & O_CLOEXEC ? F_DUPFD_CLOEXEC : F_DUPFD, 0);
}

static int open_temporary(const place* found, int flags, mode_t mode) {
  char real[PATH_MAX];
  if (found->layer == OWN) return real_open(found->real, flags, mode);
  if (found->layer == MISSING) return fail(ENOENT);
  if (!S_ISDIR(found->status.st_mode)) return fail(ENOTDIR);
  if ((found->layer == LOWER || found->merged) && !has_own_mode(found->path) && check_access(found->path, W_OK | X_OK) < 0)
    return -1;
  if (copy_folder(found->path) < 0 || !upper_path(found->path, real)) return -1;
  return real_open(real, flags, mode);
}

static int open_regular(place* found, int flags) {
  bool writes = (flags & O_ACCMODE) != O_RDONLY || flags & O_TRUNC;
  if (writes && found->layer == LOWER) {
    int mode = ((flags & O_ACCMODE) != O_WRONLY ? R_OK : 0) | W_OK;
    if (check_access(found->real, mode) < 0) return -1;
    if (copy_up(found, !(flags & O_TRUNC)) < 0) return -1;
  }
  return real_open(found->real, flags & ~O_CREAT, 0);
}

// Opens what does not wait for another process. `late` is set for other files, which are opened without the lock.
static int open_locked(place* found, int flags, mode_t mode, bool* late) {
  mode_t kind = found->status.st_mode;
  if (found->layer == OWN) {
    if (S_ISFIFO(kind)) *late = true;
    return *late ? 0 : real_open(found->real, flags, mode);
  }
  if (found->layer == MISSING) {
    if (!(flags & O_CREAT)) return fail(ENOENT);
    if (found->slash) return fail(EISDIR);
    if (make_name_free(found) < 0) return -1;
    return real_open(found->real, flags, mode);
  }
  if ((flags & O_CREAT) && (flags & O_EXCL)) return fail(EEXIST);
  if (S_ISDIR(kind))
    return flags & O_DIRECTORY && (flags & O_ACCMODE) == O_RDONLY ? real_open(found->real, flags, 0) : fail(EISDIR);
  if (S_ISLNK(kind)) return fail(ELOOP);
  if (S_ISSOCK(kind)) return fail(ENXIO);
  if (is_below(found->path, "/proc") || is_below(found->path, "/sys")) return fail(EACCES);
  if (S_ISREG(kind)) return open_regular(found, flags);
  if (S_ISFIFO(kind) && found->layer == LOWER) return fail(ENXIO);
  if (!S_ISFIFO(kind) && !is_harmless(&found->status)) return fail(EACCES);
  *late = true;
  return 0;
}

static int open_for_writing(int at, const char* given, int flags, mode_t mode) {
  place found;
  bool late = false;
  bool temporary = (flags & O_TMPFILE) == O_TMPFILE;
  lock held = take_lock();
  int descriptor = resolve(at, given, !(flags & O_NOFOLLOW) && !((flags & O_CREAT) && (flags & O_EXCL)), &found);
  if (descriptor == 0 && found.layer == MAGIC)
    late = true;
  else if (descriptor == 0)
    descriptor = temporary ? open_temporary(&found, flags, mode) : open_locked(&found, flags, mode, &late);
  release(held);
  if (!late) return descriptor;
  return found.layer == MAGIC ? open_descriptor(&found, flags) : real_open(found.real, flags & ~O_CREAT, 0);
}

int overlay_open(int at, const char* given, int flags, mode_t mode) {
  if (protects && writes_file(flags)) return open_for_writing(at, given, flags, mode);
  if (IS_PLAIN) return (int)KERNEL(SYS_openat, at, given, flags, mode);
  return open_for_reading(at, given, flags);
}

#pragma GCC visibility push(default)

#define MODE_OF(flags)                                         \
  mode_t mode = 0;                                             \
  if ((flags & O_CREAT) || (flags & O_TMPFILE) == O_TMPFILE) { \
    va_list rest;                                              \
    va_start(rest, flags);                                     \
    mode = va_arg(rest, mode_t);                               \
    va_end(rest);                                              \
  }

int open(const char* path, int flags, ...) {
  MODE_OF(flags)
  return overlay_open(AT_FDCWD, path, flags, mode);
}
ALIAS(open64, open);

int openat(int at, const char* path, int flags, ...) {
  MODE_OF(flags)
  return overlay_open(at, path, flags, mode);
}
ALIAS(openat64, openat);

int creat(const char* path, mode_t mode) { return overlay_open(AT_FDCWD, path, O_CREAT | O_WRONLY | O_TRUNC, mode); }
ALIAS(creat64, creat);

int __open_2(const char* path, int flags) { return overlay_open(AT_FDCWD, path, flags, 0); }
ALIAS(__open64_2, __open_2);

int __openat_2(int at, const char* path, int flags) { return overlay_open(at, path, flags, 0); }
ALIAS(__openat64_2, __openat_2);

// ---- attributes that are read

static int stat_descriptor(int descriptor, struct stat* status) {
  char path[PATH_MAX];
  int before = errno;
  if (KERNEL(SYS_fstat, descriptor, status) < 0) return -1;
  if (!IS_PLAIN && S_ISDIR(status->st_mode) && path_of_descriptor(descriptor, path)) patch_folder(path, status);
  errno = before;
  return 0;
}

static int overlay_stat(int at, const char* given, struct stat* status, int flags) {
  place found;
  if (given != NULL && *given == '\0' && flags & AT_EMPTY_PATH && at != AT_FDCWD) { return stat_descriptor(at, status); }
  if (IS_PLAIN) return (int)KERNEL(SYS_newfstatat, at, given, status, flags);
  if (resolve(at, given, !(flags & AT_SYMLINK_NOFOLLOW), &found) < 0) return -1;
  if (found.layer == MISSING || (found.layer == OWN && found.status.st_mode == 0)) return fail(ENOENT);
  if (found.merged) patch_folder(found.path, &found.status);
  *status = found.status;
  return 0;
}

int stat(const char* path, struct stat* status) { return overlay_stat(AT_FDCWD, path, status, 0); }
int lstat(const char* path, struct stat* status) { return overlay_stat(AT_FDCWD, path, status, AT_SYMLINK_NOFOLLOW); }
int fstat(int descriptor, struct stat* status) { return stat_descriptor(descriptor, status); }
int fstatat(int at, const char* path, struct stat* status, int flags) { return overlay_stat(at, path, status, flags); }
int stat64(const char* path, struct stat64* status) { return stat(path, (struct stat*)status); }
int lstat64(const char* path, struct stat64* status) { return lstat(path, (struct stat*)status); }
int fstat64(int descriptor, struct stat64* status) { return fstat(descriptor, (struct stat*)status); }
int fstatat64(int at, const char* path, struct stat64* status, int flags) { return fstatat(at, path, (struct stat*)status, flags); }

// The names in C libraries before glibc 2.33.
int __xstat(int version, const char* path, struct stat* status) { return (void)version, stat(path, status); }
int __lxstat(int version, const char* path, struct stat* status) { return (void)version, lstat(path, status); }
int __fxstat(int version, int descriptor, struct stat* status) { return (void)version, fstat(descriptor, status); }
int __fxstatat(int version, int at, const char* path, struct stat* status, int flags) {
  return (void)version, fstatat(at, path, status, flags);
}
int __xstat64(int version, const char* path, struct stat64* status) { return (void)version, stat64(path, status); }
int __lxstat64(int version, const char* path, struct stat64* status) { return (void)version, lstat64(path, status); }
int __fxstat64(int version, int descriptor, struct stat64* status) { return (void)version, fstat64(descriptor, status); }
int __fxstatat64(int version, int at, const char* path, struct stat64* status, int flags) {
  return (void)version, fstatat64(at, path, status, flags);
}

int statx(int at, const char* path, int flags, unsigned mask, struct statx* status) {
  place found;
  if (IS_PLAIN) return (int)KERNEL(SYS_statx, at, path, flags, mask, status);
  bool empty = path != NULL && *path == '\0' && flags & AT_EMPTY_PATH;
  struct stat known;
  if (empty) {
    if (KERNEL(SYS_statx, at, path, flags, mask, status) < 0) return -1;
    if (!S_ISDIR(status->stx_mode) || at == AT_FDCWD || stat_descriptor(at, &known) < 0) return 0;
  } else {
    if (resolve(at, path, !(flags & AT_SYMLINK_NOFOLLOW), &found) < 0) return -1;
    if (found.layer == MISSING) return fail(ENOENT);
    int only = flags & ~AT_SYMLINK_NOFOLLOW;
    if (KERNEL(SYS_statx, AT_FDCWD, found.real, found.layer == MAGIC ? only : only | AT_SYMLINK_NOFOLLOW, mask, status) < 0)
      return -1;
    if (found.merged) patch_folder(found.path, &found.status);
    known = found.status;
    if (S_ISLNK(known.st_mode)) status->stx_size = (uint64_t)known.st_size;
  }
  if (S_ISDIR(status->stx_mode)) {
    status->stx_ino = known.st_ino;
    status->stx_dev_major = major(known.st_dev);
    status->stx_dev_minor = minor(known.st_dev);
    status->stx_nlink = (uint32_t)known.st_nlink;
    status->stx_mode = (uint16_t)known.st_mode;
    status->stx_uid = known.st_uid;
    status->stx_gid = known.st_gid;
  }
  return 0;
}

static int real_access(const char* real, int mode, int flags) {
  if (flags == 0) return (int)KERNEL(SYS_faccessat, AT_FDCWD, real, mode);
  if (flags == AT_EACCESS) return check_access(real, mode);
  return (int)KERNEL(SYS_faccessat2, AT_FDCWD, real, mode, flags);
}

int faccessat(int at, const char* path, int mode, int flags) {
  place found;
  if (IS_PLAIN && flags == 0) return (int)KERNEL(SYS_faccessat, at, path, mode);
  if (IS_PLAIN && KERNEL(SYS_faccessat2, at, path, mode, flags) == 0) return 0;
  if (IS_PLAIN && errno != ENOSYS && errno != EPERM) return -1;
  if (resolve(at, path, !(flags & AT_SYMLINK_NOFOLLOW), &found) < 0) return -1;
  if (found.layer == MISSING) return fail(ENOENT);
  if (S_ISLNK(found.status.st_mode)) return 0;
  return real_access(found.merged && !has_own_mode(found.path) ? found.path : found.real, mode, flags);
}

int access(const char* path, int mode) { return faccessat(AT_FDCWD, path, mode, 0); }
int euidaccess(const char* path, int mode) { return faccessat(AT_FDCWD, path, mode, AT_EACCESS); }
int eaccess(const char* path, int mode) { return faccessat(AT_FDCWD, path, mode, AT_EACCESS); }

static ssize_t store_target(char* text, char* buffer, size_t size) {
  const char* target = link_target(text);
  if (target == NULL) return fail(ENOENT);
  size_t length = strlen(target);
  if (length > size) length = size;
  memcpy(buffer, target, length);
  return (ssize_t)length;
}

ssize_t readlinkat(int at, const char* path, char* buffer, size_t size) {
  place found;
  char text[PATH_MAX];
  if (IS_PLAIN) return KERNEL(SYS_readlinkat, at, path, buffer, size);
  if (path != NULL && *path == '\0') {
    ssize_t length = KERNEL(SYS_readlinkat, at, path, text, sizeof text - 1);
    if (length < 0) return -1;
    text[length] = '\0';
    return store_target(text, buffer, size);
  }
  if (resolve(at, path, false, &found) < 0) return -1;
  if (found.layer == MISSING) return fail(ENOENT);
  if (!S_ISLNK(found.status.st_mode)) return fail(found.status.st_mode == 0 ? ENOENT : EINVAL);
  if (read_link(found.real, text) < 0) return -1;
  strip_private(text);
  return store_target(text, buffer, size);
}

ssize_t readlink(const char* path, char* buffer, size_t size) { return readlinkat(AT_FDCWD, path, buffer, size); }
ssize_t __readlink_chk(const char* path, char* buffer, size_t size, size_t room) {
  return (void)room, readlink(path, buffer, size);
}
ssize_t __readlinkat_chk(int at, const char* path, char* buffer, size_t size, size_t room) {
  return (void)room, readlinkat(at, path, buffer, size);
}

char* realpath(const char* path, char* resolved) {
  place found;
  if (IS_PLAIN) return NEXT(realpath)(path, resolved);
  if (path == NULL) {
    errno = EINVAL;
    return NULL;
  }
  if (resolve(AT_FDCWD, path, true, &found) < 0) return NULL;
  if (found.layer == MISSING || found.status.st_mode == 0) {
    errno = ENOENT;
    return NULL;
  }
  if (found.layer == MAGIC && read_link(found.path, found.real) > 0 && found.real[0] == '/') {
    strip_private(found.real);
    strcpy(found.path, found.real);
  }
  return resolved == NULL ? strdup(found.path) : strcpy(resolved, found.path);
}
char* __realpath_chk(const char* path, char* resolved, size_t room) { return (void)room, realpath(path, resolved); }
char* canonicalize_file_name(const char* path) { return realpath(path, NULL); }

#define READ_PLACE(path, follow)                              \
  place found;                                                \
  if (resolve(AT_FDCWD, path, follow, &found) < 0) return -1; \
  if (found.layer == MISSING) return fail(ENOENT);

int statfs(const char* path, struct statfs* status) {
  if (IS_PLAIN) return (int)KERNEL(SYS_statfs, path, status);
  READ_PLACE(path, true)
  return (int)KERNEL(SYS_statfs, found.real, status);
}
int statfs64(const char* path, struct statfs64* status) { return statfs(path, (struct statfs*)status); }

int statvfs(const char* path, struct statvfs* status) {
  if (IS_PLAIN) return NEXT(statvfs)(path, status);
  READ_PLACE(path, true)
  return NEXT(statvfs)(found.real, status);
}
int statvfs64(const char* path, struct statvfs64* status) { return statvfs(path, (struct statvfs*)status); }

ssize_t getxattr(const char* path, const char* name, void* value, size_t size) {
  if (IS_PLAIN) return KERNEL(SYS_getxattr, path, name, value, size);
  READ_PLACE(path, true)
  return KERNEL(SYS_getxattr, found.real, name, value, size);
}
ssize_t lgetxattr(const char* path, const char* name, void* value, size_t size) {
  if (IS_PLAIN) return KERNEL(SYS_lgetxattr, path, name, value, size);
  READ_PLACE(path, false)
  return KERNEL(SYS_lgetxattr, found.real, name, value, size);
}
ssize_t listxattr(const char* path, char* list, size_t size) {
  if (IS_PLAIN) return KERNEL(SYS_listxattr, path, list, size);
  READ_PLACE(path, true)
  return KERNEL(SYS_listxattr, found.real, list, size);
}
ssize_t llistxattr(const char* path, char* list, size_t size) {
  if (IS_PLAIN) return KERNEL(SYS_llistxattr, path, list, size);
  READ_PLACE(path, false)
  return KERNEL(SYS_llistxattr, found.real, list, size);
}

int inotify_add_watch(int descriptor, const char* path, uint32_t mask) {
  if (IS_PLAIN) return (int)KERNEL(SYS_inotify_add_watch, descriptor, path, mask);
  READ_PLACE(path, true)
  return (int)KERNEL(SYS_inotify_add_watch, descriptor, found.real, mask);
}

// ---- the current folder

int chdir(const char* path) {
  if (IS_PLAIN) return (int)KERNEL(SYS_chdir, path);
  READ_PLACE(path, true)
  return (int)KERNEL(SYS_chdir, found.merged ? found.path : found.real);
}

int chroot(const char* path) {
  if (!protects) return NEXT(chroot)(path);
  return fail(EPERM);
}

char* getcwd(char* buffer, size_t size) {
  char path[PATH_MAX];
  if (!protects) return NEXT(getcwd)(buffer, size);
  if (KERNEL(SYS_getcwd, path, sizeof path) < 0) return NULL;
  strip_private(path);
  size_t length = strlen(path) + 1;
  if (buffer == NULL) {
    buffer = malloc(size > length ? size : length);
  } else if (size < length) {
    errno = size == 0 ? EINVAL : ERANGE;
    return NULL;
  }
  return buffer == NULL ? NULL : memcpy(buffer, path, length);
}
char* __getcwd_chk(char* buffer, size_t size, size_t room) { return (void)room, getcwd(buffer, size); }
char* getwd(char* buffer) { return getcwd(buffer, PATH_MAX); }
char* get_current_dir_name(void) { return protects ? getcwd(NULL, 0) : NEXT(get_current_dir_name)(); }

// ---- folders, links and other entries

#define IN_KERNEL(found) (is_below((found)->path, "/proc") || is_below((found)->path, "/sys"))

static int make_entry(place* found, mode_t mode, dev_t device) {
  if (found->layer == OWN && found->status.st_mode != 0) return fail(EEXIST);
  if (found->layer != MISSING && found->layer != OWN) return fail(EEXIST);
  if (S_ISCHR(mode) || S_ISBLK(mode)) return fail(EPERM);
  if (found->layer == MISSING && make_name_free(found) < 0) return -1;
  if (!S_ISDIR(mode)) return found->slash ? fail(ENOENT) : (int)KERNEL(SYS_mknodat, AT_FDCWD, found->real, mode, device);
  if (KERNEL(SYS_mkdirat, AT_FDCWD, found->real, mode & 07777) < 0) return -1;
  return found->layer == MISSING && found->folder_lower ? hide_lower_entries(found->path, found->real) : 0;
}

int mknodat(int at, const char* path, mode_t mode, dev_t device) {
  place found;
  if (!protects) return (int)KERNEL(SYS_mknodat, at, path, mode, device);
  lock held = take_lock();
  int status = resolve(at, path, false, &found);
  if (status == 0) status = make_entry(&found, mode, device);
  release(held);
  return status;
}
int mknod(const char* path, mode_t mode, dev_t device) { return mknodat(AT_FDCWD, path, mode, device); }
int __xmknod(int version, const char* path, mode_t mode, dev_t* device) { return (void)version, mknod(path, mode, *device); }
int __xmknodat(int version, int at, const char* path, mode_t mode, dev_t* device) {
  return (void)version, mknodat(at, path, mode, *device);
}
int mkfifo(const char* path, mode_t mode) { return mknodat(AT_FDCWD, path, (mode & 07777) | S_IFIFO, 0); }
int mkfifoat(int at, const char* path, mode_t mode) { return mknodat(at, path, (mode & 07777) | S_IFIFO, 0); }

int mkdirat(int at, const char* path, mode_t mode) {
  if (!protects) return (int)KERNEL(SYS_mkdirat, at, path, mode);
  return mknodat(at, path, (mode & 07777) | S_IFDIR, 0);
}
int mkdir(const char* path, mode_t mode) { return mkdirat(AT_FDCWD, path, mode); }

static int remove_entry(place* found, int flags) {
  bool is_folder = S_ISDIR(found->status.st_mode);
  if (found->layer == MISSING || found->status.st_mode == 0) return fail(ENOENT);
  if (found->layer == OWN) return (int)KERNEL(SYS_unlinkat, AT_FDCWD, found->real, flags);
  if (IN_KERNEL(found)) return fail(EPERM);
  if (flags & AT_REMOVEDIR && !is_folder) return fail(ENOTDIR);
  if (!(flags & AT_REMOVEDIR) && is_folder) return fail(EISDIR);
  if (strcmp(found->path, "/") == 0) return fail(EBUSY);
  if (may_change_folder(found) < 0) return -1;
  if (is_folder && !is_empty(found)) return fail(ENOTEMPTY);
  if (found->layer == UPPER || found->redirected) {
    char real[PATH_MAX];
    if (!upper_path(found->path, real)) return -1;
    if (is_folder) remove_marks(real);
    if (KERNEL(SYS_unlinkat, AT_FDCWD, real, flags) < 0) return -1;
  }
  return hide_lower(found);
}

int overlay_unlink(int at, const char* given, int flags) {
  place found;
  if (!protects) return (int)KERNEL(SYS_unlinkat, at, given, flags);
  size_t length = given == NULL ? 0 : strlen(given);
  if (flags & AT_REMOVEDIR && length > 0 && given[length - 1] == '.' && (length == 1 || given[length - 2] == '/'))
    return fail(EINVAL);
  lock held = take_lock();
  int status = resolve(at, given, false, &found);
  if (status == 0) status = remove_entry(&found, flags);
  release(held);
  return status;
}

int unlinkat(int at, const char* path, int flags) { return overlay_unlink(at, path, flags); }
int unlink(const char* path) { return overlay_unlink(AT_FDCWD, path, 0); }
int rmdir(const char* path) { return overlay_unlink(AT_FDCWD, path, AT_REMOVEDIR); }
int remove(const char* path) {
  int before = errno;
  if (unlink(path) == 0) return 0;
  if (errno != EISDIR) return -1;
  errno = before;
  return rmdir(path);
}

// Makes the new name of a rename free. Returns -1 if something is there that cannot be replaced.
static int replace_target(const place* old, place* new) {
  bool is_folder = S_ISDIR(old->status.st_mode);
  if (new->layer == MISSING) {
    if (!is_folder && new->slash) return fail(ENOTDIR);
    return make_name_free(new);
  }
  if (is_folder && !S_ISDIR(new->status.st_mode)) return fail(ENOTDIR);
  if (!is_folder && S_ISDIR(new->status.st_mode)) return fail(EISDIR);
  if (may_change_folder(new) < 0) return -1;
  if (is_folder) {
    if (remove_entry(new, AT_REMOVEDIR) < 0) return -1;
    char real[PATH_MAX];
    struct stat status;
    if (!upper_path(new->path, real)) return -1;
    if (KERNEL(SYS_newfstatat, AT_FDCWD, real, &status, AT_SYMLINK_NOFOLLOW) == 0) KERNEL(SYS_unlinkat, AT_FDCWD, real, 0);
    return 0;
  }
  char parent[PATH_MAX];
  strcpy(parent, new->path);
  *strrchr(parent, '/') = '\0';
  return parent[0] == '\0' ? 0 : copy_folder(parent);
}

// Renames a file of the user that cannot be copied: the new name stands for it.
static int redirect(place* old, place* new) {
  char text[PATH_MAX], target[PATH_MAX], entry[PATH_MAX];
  if (snprintf(text, sizeof text, "/dev/null/R%s", old->real) >= PATH_MAX) return fail(ENAMETOOLONG);
  if (!upper_path(new->path, target) || !upper_path(old->path, entry)) return -1;
  KERNEL(SYS_unlinkat, AT_FDCWD, target, 0);
  if (KERNEL(SYS_symlinkat, text, AT_FDCWD, target) < 0) return -1;
  if (old->redirected) KERNEL(SYS_unlinkat, AT_FDCWD, entry, 0);
  return 0;
}

static int rename_found(place* old, place* new, unsigned flags) {
  char target[PATH_MAX];
  if (old->layer == MISSING || old->status.st_mode == 0) return fail(ENOENT);
  if (old->layer == OWN && new->layer == OWN) return (int)KERNEL(SYS_renameat2, AT_FDCWD, old->real, AT_FDCWD, new->real, flags);
  if (old->layer == OWN || new->layer == OWN) return fail(EXDEV);
  if (IN_KERNEL(old) || IN_KERNEL(new)) return fail(EACCES);
  if (flags & ~1u) return fail(EINVAL);
  if (flags & 1u /* RENAME_NOREPLACE */ && new->layer != MISSING) return fail(EEXIST);
  if (strcmp(old->path, new->path) == 0) return 0;
  if (new->layer != MISSING && old->layer == new->layer && old->status.st_ino == new->status.st_ino &&
      old->status.st_dev == new->status.st_dev && !S_ISDIR(old->status.st_mode))
    return 0;
  bool is_folder = S_ISDIR(old->status.st_mode);
  if (is_folder && is_below(new->path, old->path)) return fail(EINVAL);
  if (may_change_folder(old) < 0) return -1;
  if (is_folder && (old->layer == LOWER || old->merged)) return fail(EXDEV);
  if (replace_target(old, new) < 0 || !upper_path(new->path, target)) return -1;
  int before = errno;
  if (old->layer == LOWER && copy_up(old, true) < 0) {
    errno = before;
    return redirect(old, new) < 0 ? -1 : hide_lower(old);
  }
  if (is_folder && new->folder_lower && hide_lower_entries(new->path, old->real) < 0) return -1;
  if (KERNEL(SYS_renameat2, AT_FDCWD, old->real, AT_FDCWD, target, 0) < 0) return -1;
  return hide_lower(old);
}

int renameat2(int old_at, const char* old_path, int new_at, const char* new_path, unsigned flags) {
  place old, new;
  if (!protects) return (int)KERNEL(SYS_renameat2, old_at, old_path, new_at, new_path, flags);
  lock held = take_lock();
  int status = resolve(old_at, old_path, false, &old);
  if (status == 0) status = resolve(new_at, new_path, false, &new);
  if (status == 0) status = rename_found(&old, &new, flags);
  release(held);
  return status;
}
int renameat(int old_at, const char* old, int new_at, const char* new) { return renameat2(old_at, old, new_at, new, 0); }
int rename(const char* old, const char* new) { return renameat2(AT_FDCWD, old, AT_FDCWD, new, 0); }

static int link_found(place* old, place* new) {
  char text[PATH_MAX];
  if (old->layer == MISSING || old->status.st_mode == 0) return fail(ENOENT);
  if (new->layer == OWN ? new->status.st_mode != 0 : new->layer != MISSING) return fail(EEXIST);
  if (S_ISDIR(old->status.st_mode)) return fail(EPERM);
  if (old->layer == MAGIC) {  // a file of O_TMPFILE gets a name
    if (read_link(old->path, text) < 0) return -1;
    if (!is_below(text, run_folder)) return fail(EXDEV);
    strcpy(old->real, old->path);
  } else if (new->layer == OWN && old->layer != OWN) {
    return fail(EXDEV);
  }
  if (new->layer == MISSING && make_name_free(new) < 0) return -1;
  if (old->layer == LOWER && copy_up(old, true) < 0) return redirect(old, new);
  return (int)KERNEL(SYS_linkat, AT_FDCWD, old->real, AT_FDCWD, new->real, old->layer == MAGIC ? AT_SYMLINK_FOLLOW : 0);
}

int linkat(int old_at, const char* old_path, int new_at, const char* new_path, int flags) {
  place old, new;
  char name[64];
  if (!protects) return (int)KERNEL(SYS_linkat, old_at, old_path, new_at, new_path, flags);
  if (flags & AT_EMPTY_PATH && old_path != NULL && *old_path == '\0') {
    snprintf(name, sizeof name, "/proc/self/fd/%d", old_at);
    old_path = name;
    flags |= AT_SYMLINK_FOLLOW;
  }
  lock held = take_lock();
  int status = resolve(old_at, old_path, (flags & AT_SYMLINK_FOLLOW) != 0, &old);
  if (status == 0) status = resolve(new_at, new_path, false, &new);
  if (status == 0) status = link_found(&old, &new);
  release(held);
  return status;
}
int link(const char* old, const char* new) { return linkat(AT_FDCWD, old, AT_FDCWD, new, 0); }

int symlinkat(const char* target, int at, const char* path) {
  place found;
  char text[PATH_MAX];
  if (!protects) return (int)KERNEL(SYS_symlinkat, target, at, path);
  if (target == NULL || *target == '\0') return fail(ENOENT);
  if (snprintf(text, sizeof text, "/dev/null/L%s", target) >= PATH_MAX) return fail(ENAMETOOLONG);
  lock held = take_lock();
  int status = resolve(at, path, false, &found);
  if (status == 0 && (found.layer == OWN ? found.status.st_mode != 0 : found.layer != MISSING)) status = fail(EEXIST);
  if (status == 0 && found.slash) status = fail(ENOENT);
  if (status == 0 && found.layer == MISSING) status = make_name_free(&found);
  if (status == 0) status = (int)KERNEL(SYS_symlinkat, found.layer == OWN ? target : text, AT_FDCWD, found.real);
  release(held);
  return status;
}
int symlink(const char* target, const char* path) { return symlinkat(target, AT_FDCWD, path); }

// ---- attributes that are changed

// Puts a private copy of the file in place for a change of its attributes. Returns 1 if the change is to be ignored.
static int prepare_change(int at, const char* given, bool follow, bool owner_only, place* found) {
  if (resolve(at, given, follow, found) < 0) return -1;
  if (found->layer == MISSING || found->status.st_mode == 0) return fail(ENOENT);
  if (found->layer == MAGIC) {
    char text[PATH_MAX];
    if (read_link(found->path, text) < 0) return -1;
    strcpy(found->real, found->path);
    return is_below(text, run_folder) ? 0 : 1;
  }
  if (IN_KERNEL(found)) return fail(EPERM);
  if (found->layer != LOWER) return 0;
  uid_t user = geteuid();
  if (owner_only && user != 0 && found->status.st_uid != user) return fail(EPERM);
  if (!S_ISREG(found->status.st_mode) && !S_ISDIR(found->status.st_mode) && !S_ISLNK(found->status.st_mode)) return 1;
  if (S_ISREG(found->status.st_mode) && found->status.st_size > LARGE) return 1;
  int before = errno;
  if (copy_up(found, true) == 0) return 0;
  errno = before;
  return 1;
}

// Runs `change` on the private copy, in which `found.real` is the path.
#define CHANGE(at, path, follow, owner_only, change)                 \
  place found;                                                       \
  lock held = take_lock();                                           \
  int status = prepare_change(at, path, follow, owner_only, &found); \
  if (status == 0)                                                   \
    status = (int)(change);                                          \
  else if (status == 1)                                              \
    status = 0;                                                      \
  release(held);                                                     \
  return status;

static int link_flag(const place* found) { return found->layer == MAGIC ? 0 : AT_SYMLINK_NOFOLLOW; }

int fchmodat(int at, const char* path, mode_t mode, int flags) {
  if (!protects) return NEXT(fchmodat)(at, path, mode, flags);
  CHANGE(at, path, !(flags & AT_SYMLINK_NOFOLLOW), true,
         S_ISLNK(found.status.st_mode) ? fail(EOPNOTSUPP) : KERNEL(SYS_fchmodat, AT_FDCWD, found.real, mode))
}
int chmod(const char* path, mode_t mode) { return fchmodat(AT_FDCWD, path, mode, 0); }
int lchmod(const char* path, mode_t mode) { return fchmodat(AT_FDCWD, path, mode, AT_SYMLINK_NOFOLLOW); }

// A change of owner that only the superuser may make is ignored for a superuser without rights.
static int change_owner(const place* found, uid_t user, gid_t group) {
  int before = errno;
  if (KERNEL(SYS_fchownat, AT_FDCWD, found->real, user, group, link_flag(found)) == 0) return 0;
  if (errno != EPERM || geteuid() != 0) return -1;
  errno = before;
  return 0;
}

int fchownat(int at, const char* path, uid_t user, gid_t group, int flags) {
  if (!protects) return (int)KERNEL(SYS_fchownat, at, path, user, group, flags);
  if (path != NULL && *path == '\0' && flags & AT_EMPTY_PATH) return fchown(at, user, group);
  CHANGE(at, path, !(flags & AT_SYMLINK_NOFOLLOW), true, change_owner(&found, user, group))
}
int chown(const char* path, uid_t user, gid_t group) { return fchownat(AT_FDCWD, path, user, group, 0); }
int lchown(const char* path, uid_t user, gid_t group) { return fchownat(AT_FDCWD, path, user, group, AT_SYMLINK_NOFOLLOW); }

static int ignore_descriptor(int descriptor) { return protects && is_foreign(descriptor); }

int utimensat(int at, const char* path, const struct timespec times[2], int flags) {
  if (!protects)
    return (int)KERNEL(SYS_utimensat, at, path != NULL && *path == '\0' && flags ? NULL : path, times, flags & ~AT_EMPTY_PATH);
  if (path == NULL || (*path == '\0' && flags & AT_EMPTY_PATH))
    return ignore_descriptor(at) ? 0 : (int)KERNEL(SYS_utimensat, at, NULL, times, 0);
  CHANGE(at, path, !(flags & AT_SYMLINK_NOFOLLOW), false, KERNEL(SYS_utimensat, AT_FDCWD, found.real, times, link_flag(&found)))
}

static int set_times(int at, const char* path, const struct timeval times[2], int flags) {
  if (times == NULL) return utimensat(at, path, NULL, flags);
  struct timespec exact[2] = {{times[0].tv_sec, times[0].tv_usec * 1000}, {times[1].tv_sec, times[1].tv_usec * 1000}};
  return utimensat(at, path, exact, flags);
}
int utimes(const char* path, const struct timeval times[2]) { return set_times(AT_FDCWD, path, times, 0); }
int lutimes(const char* path, const struct timeval times[2]) { return set_times(AT_FDCWD, path, times, AT_SYMLINK_NOFOLLOW); }
int futimesat(int at, const char* path, const struct timeval times[2]) { return set_times(at, path, times, 0); }
int futimes(int descriptor, const struct timeval times[2]) { return set_times(descriptor, NULL, times, 0); }
int futimens(int descriptor, const struct timespec times[2]) { return utimensat(descriptor, "", times, AT_EMPTY_PATH); }
int utime(const char* path, const struct utimbuf* times) {
  if (times == NULL) return utimensat(AT_FDCWD, path, NULL, 0);
  struct timespec exact[2] = {{times->actime, 0}, {times->modtime, 0}};
  return utimensat(AT_FDCWD, path, exact, 0);
}

int setxattr(const char* path, const char* name, const void* value, size_t size, int flags) {
  if (!protects) return (int)KERNEL(SYS_setxattr, path, name, value, size, flags);
  CHANGE(AT_FDCWD, path, true, false, KERNEL(SYS_setxattr, found.real, name, value, size, flags))
}
int lsetxattr(const char* path, const char* name, const void* value, size_t size, int flags) {
  if (!protects) return (int)KERNEL(SYS_lsetxattr, path, name, value, size, flags);
  CHANGE(AT_FDCWD, path, false, false, KERNEL(SYS_lsetxattr, found.real, name, value, size, flags))
}
int removexattr(const char* path, const char* name) {
  if (!protects) return (int)KERNEL(SYS_removexattr, path, name);
  CHANGE(AT_FDCWD, path, true, false, KERNEL(SYS_removexattr, found.real, name))
}
int lremovexattr(const char* path, const char* name) {
  if (!protects) return (int)KERNEL(SYS_lremovexattr, path, name);
  CHANGE(AT_FDCWD, path, false, false, KERNEL(SYS_lremovexattr, found.real, name))
}

int truncate(const char* path, off_t length) {
  if (!protects) return (int)KERNEL(SYS_truncate, path, length);
  int descriptor = overlay_open(AT_FDCWD, path, O_WRONLY | O_CLOEXEC | (length == 0 ? O_TRUNC : 0), 0);
  if (descriptor < 0) return -1;
  int status = ftruncate(descriptor, length);
  KERNEL(SYS_close, descriptor);
  return status;
}
ALIAS(truncate64, truncate);

// Descriptors of files of the user that the script inherited or opened for reading: a change has no effect.
int ftruncate(int descriptor, off_t length) {
  return ignore_descriptor(descriptor) ? 0 : (int)KERNEL(SYS_ftruncate, descriptor, length);
}
ALIAS(ftruncate64, ftruncate);
int fchmod(int descriptor, mode_t mode) { return ignore_descriptor(descriptor) ? 0 : (int)KERNEL(SYS_fchmod, descriptor, mode); }
int fchown(int descriptor, uid_t user, gid_t group) {
  int before = errno;
  if (ignore_descriptor(descriptor) || KERNEL(SYS_fchown, descriptor, user, group) == 0) return 0;
  if (!protects || errno != EPERM || geteuid() != 0) return -1;
  errno = before;
  return 0;
}
int fallocate(int descriptor, int mode, off_t offset, off_t length) {
  return ignore_descriptor(descriptor) ? 0 : (int)KERNEL(SYS_fallocate, descriptor, mode, offset, length);
}
ALIAS(fallocate64, fallocate);
int posix_fallocate(int descriptor, off_t offset, off_t length) {
  return ignore_descriptor(descriptor) ? 0 : NEXT(posix_fallocate)(descriptor, offset, length);
}
ALIAS(posix_fallocate64, posix_fallocate);
int fsetxattr(int descriptor, const char* name, const void* value, size_t size, int flags) {
  return ignore_descriptor(descriptor) ? 0 : (int)KERNEL(SYS_fsetxattr, descriptor, name, value, size, flags);
}
int fremovexattr(int descriptor, const char* name) {
  return ignore_descriptor(descriptor) ? 0 : (int)KERNEL(SYS_fremovexattr, descriptor, name);
}
