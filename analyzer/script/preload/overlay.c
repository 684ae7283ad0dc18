// The private copy of files. A changed or new file is at upper/ABSOLUTE_PATH in the folder of the run. Other files are those of the
// user, which are only read.
//
// Links in the private copy have texts that lead nowhere, so that the kernel never follows one to a file of the user:
//   /dev/null/         the file of the user with this name was removed
//   /dev/null/L<text>  a symbolic link that the script made
//   /dev/null/R<path>  the file of the user at <path>, which was renamed and is too large to be copied
// A folder in the private copy adds to the folder of the user with the same path. A folder that replaces a removed one starts with
// an entry for each removed file.
//
// Only the stack is used for memory: the functions may run in a child of vfork, and in signal handlers.

#include "common.h"
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/sysmacros.h>

#define NOWHERE "/dev/null/"
#define LARGEST_COPY (64 << 20)
#define MOST_LINKS 40

static volatile unsigned char* shared_state;  // one byte, the same for all processes of the run: whether a file was changed
static unsigned char local_state;

__attribute__((constructor)) static void map_state(void) {
  char target[PATH_MAX];
  const char* value = getenv("INFO_SCRIPT_FOLDER");
  if (getenv("INFO_SCRIPT_PROTECT") == NULL || value == NULL) return;
  if (snprintf(target, sizeof target, "%s/changed", value) >= PATH_MAX) return;
  int before = errno;
  int descriptor = (int)KERNEL(SYS_openat, AT_FDCWD, target, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (descriptor >= 0 && KERNEL(SYS_ftruncate, descriptor, 1) == 0) {
    void* mapped = mmap(NULL, 1, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
    if (mapped != MAP_FAILED) shared_state = mapped;
  }
  if (descriptor >= 0) KERNEL(SYS_close, descriptor);
  errno = before;
}

// Without the shared byte every call looks for the private copy.
bool has_changes(void) { return local_state || shared_state == NULL || *shared_state; }

void set_changed(void) {
  local_state = 1;
  if (shared_state != NULL) *shared_state = 1;
}

bool upper_path(const char* path, char* real) {
  return snprintf(real, PATH_MAX, "%s/upper%s", run_folder, path) < PATH_MAX || fail(ENAMETOOLONG) == 0;
}

void strip_private(char* path) {
  size_t length = strlen(run_folder);
  if (strncmp(path, run_folder, length) != 0 || strncmp(path + length, "/upper", 6) != 0) return;
  const char* rest = path + length + 6;
  if (*rest == '/')
    memmove(path, rest, strlen(rest) + 1);
  else if (*rest == '\0')
    strcpy(path, "/");
}

ssize_t read_link(const char* real, char* text) {
  ssize_t size = KERNEL(SYS_readlinkat, AT_FDCWD, real, text, PATH_MAX - 1);
  if (size >= 0) text[size] = '\0';
  return size;
}

const char* link_target(const char* text) {
  size_t length = sizeof NOWHERE - 1;
  if (strncmp(text, NOWHERE, length) != 0) return text;
  return text[length] == '\0' ? NULL : text + length + 1;
}

static bool is_redirection(const char* text) { return strncmp(text, NOWHERE "R", sizeof NOWHERE) == 0; }

static int status_of(const char* real, struct stat* status) {
  return (int)KERNEL(SYS_newfstatat, AT_FDCWD, real, status, AT_SYMLINK_NOFOLLOW);
}

static bool is_lower_folder(const char* path) {
  struct stat status;
  int before = errno;
  bool found = status_of(path, &status) == 0 && S_ISDIR(status.st_mode);
  errno = before;
  return found;
}

// Folders of the user that are known to be no links. The run does not change them.
static uint64_t known_folders[1024];

static uint64_t hash_of(const char* path) {
  uint64_t hash = 14695981039346656037u;
  for (; *path != '\0'; path++) hash = (hash ^ (unsigned char)*path) * 1099511628211u;
  return hash;
}

static bool is_known_folder(const char* path) {
  uint64_t hash = hash_of(path);
  return __atomic_load_n(&known_folders[hash % 1024], __ATOMIC_RELAXED) == hash;
}

static void remember_folder(const char* path) {
  uint64_t hash = hash_of(path);
  __atomic_store_n(&known_folders[hash % 1024], hash, __ATOMIC_RELAXED);
}

bool path_of_descriptor(int descriptor, char* path) {
  char link[64];
  snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
  if (read_link(link, path) < 0) return false;
  strip_private(path);
  return true;
}

bool is_foreign(int descriptor) {
  char link[64], path[PATH_MAX];
  struct stat status;
  int before = errno;
  snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
  bool foreign = read_link(link, path) > 0 && path[0] == '/' && !is_below(path, run_folder) && strncmp(path, "/memfd:", 7) != 0 &&
                 KERNEL(SYS_fstat, descriptor, &status) == 0 && (S_ISREG(status.st_mode) || S_ISDIR(status.st_mode));
  errno = before;
  return foreign;
}

// The state of a walk along a path.
typedef struct {
  bool upper;  // whether the folder is in the private copy
  bool lower;  // whether it is a folder of the user
} layers;

static layers layers_of(const char* path) {
  char real[PATH_MAX];
  layers found = {true, true};
  if (*path == '\0') return found;
  found.upper = upper_path(path, real) && is_lower_folder(real);
  found.lower = is_lower_folder(path);
  return found;
}

// Looks for the entry found->path of a folder. Fills in where it is. Returns -1 for errors other than a missing entry.
static int look(place* found, layers folder) {
  char text[PATH_MAX];
  found->layer = MISSING;
  found->redirected = found->removed = found->merged = false;
  if (folder.upper) {
    if (!upper_path(found->path, found->real)) return -1;
    if (status_of(found->real, &found->status) == 0) {
      if (S_ISLNK(found->status.st_mode)) {
        if (read_link(found->real, text) < 0) return -1;
        const char* target = link_target(text);
        if (target == NULL) {
          found->removed = true;
          return 0;
        }
        if (is_redirection(text)) {
          strcpy(found->real, target);
          found->redirected = true;
          found->layer = LOWER;
          return status_of(found->real, &found->status);
        }
        found->status.st_size = (off_t)strlen(target);
      }
      found->layer = UPPER;
      return 0;
    }
    if (errno != ENOENT && errno != ENOTDIR) return -1;
  }
  if (folder.lower) {
    if (status_of(found->path, &found->status) == 0) {
      strcpy(found->real, found->path);
      found->layer = LOWER;
      return 0;
    }
    if (errno != ENOENT && errno != ENOTDIR) return -1;
  }
  return upper_path(found->path, found->real) ? 0 : -1;
}

// Puts the path of `given` as seen from the folder `at` into `rest`.
static int start_of_walk(int at, const char* given, char* rest) {
  if (given == NULL) return fail(EFAULT);
  if (*given == '\0') return fail(ENOENT);
  size_t size = 0;
  if (*given != '/') {
    if (at == AT_FDCWD) {
      if (KERNEL(SYS_getcwd, rest, PATH_MAX) < 0) return -1;
      strip_private(rest);
    } else if (!path_of_descriptor(at, rest)) {
      return fail(EBADF);
    }
    if (rest[0] != '/') return fail(ENOTDIR);
    size = strlen(rest);
    rest[size++] = '/';
  }
  size_t length = strlen(given);
  if (size + length >= PATH_MAX) return fail(ENAMETOOLONG);
  memcpy(rest + size, given, length + 1);
  strip_private(rest);
  return 0;
}

// Goes on at the target of the link found->path, of which `following` is not walked yet.
static int follow_link(place* found, char* rest, const char* following, layers* folder) {
  char text[PATH_MAX];
  if (read_link(found->real, text) < 0) return -1;
  const char* target = link_target(text);
  char absolute[PATH_MAX];
  strcpy(absolute, target);
  strip_private(absolute);
  size_t length = strlen(absolute), more = strlen(following);
  if (length + more + 2 > PATH_MAX) return fail(ENAMETOOLONG);
  memmove(rest + length, following, more + 1);
  memcpy(rest, absolute, length);
  if (absolute[0] == '/') {
    found->path[0] = '\0';
    *folder = (layers){true, true};
  } else {
    *strrchr(found->path, '/') = '\0';
  }
  return 0;
}

// Completes what is known about a file that was found, or is missing.
static int finish(place* found, layers folder) {
  int before = errno;
  found->folder_lower = folder.lower;
  found->merged = found->layer == UPPER && S_ISDIR(found->status.st_mode) && folder.lower && is_lower_folder(found->path);
  if (is_below(found->path, run_folder)) {
    if (found->layer == MISSING) strcpy(found->real, found->path);
    if (found->layer == MISSING) found->status.st_mode = 0;
    found->layer = OWN;
  }
  errno = before;
  return 0;
}

// A folder of the path that ends with ".", ".." or "/".
static int finish_folder(place* found) {
  layers folder = {true, true};
  if (found->path[0] == '\0') {
    strcpy(found->path, "/");
  } else {
    char* last = strrchr(found->path, '/');
    *last = '\0';
    folder = layers_of(found->path);
    *last = '/';
  }
  found->slash = true;
  return look(found, folder) < 0 ? -1 : finish(found, folder);
}

// Follows a path as the kernel does, in both layers. With `follow` also a link at its end. A missing file is no error.
int resolve(int at, const char* given, bool follow, place* found) {
  char rest[PATH_MAX];
  int before = errno, links = 0;
  if (start_of_walk(at, given, rest) < 0) return -1;
  layers folder = {true, true};
  found->path[0] = '\0';
  const char* next = rest;
  while (true) {
    while (*next == '/') next++;
    if (*next == '\0') break;
    size_t length = strcspn(next, "/"), size = strlen(found->path);
    const char* following = next + length;
    bool last = following[strspn(following, "/")] == '\0';
    if (length == 1 && next[0] == '.') {
      next = following;
      continue;
    }
    if (length == 2 && next[0] == '.' && next[1] == '.') {
      char* slash = strrchr(found->path, '/');
      if (slash != NULL) *slash = '\0';
      folder = layers_of(found->path);
      next = following;
      continue;
    }
    if (length > NAME_MAX || size + length + 2 > PATH_MAX) return fail(ENAMETOOLONG);
    found->path[size] = '/';
    memcpy(found->path + size + 1, next, length);
    found->path[size + 1 + length] = '\0';
    if (!last && !folder.upper && folder.lower && is_known_folder(found->path)) {
      next = following;
      continue;
    }
    if (look(found, folder) < 0) return -1;
    found->slash = last && *following == '/';
    if (found->layer == MISSING) {
      if (!last) return fail(ENOENT);
      errno = before;
      return finish(found, folder);
    }
    if (S_ISLNK(found->status.st_mode) && (!last || follow || found->slash)) {
      if (last && strncmp(found->path, "/proc/", 6) == 0) {
        found->layer = MAGIC;
        if (KERNEL(SYS_newfstatat, AT_FDCWD, found->path, &found->status, 0) < 0) return -1;
        errno = before;
        return 0;
      }
      if (++links > MOST_LINKS) return fail(ELOOP);
      if (follow_link(found, rest, following, &folder) < 0) return -1;
      next = rest;
      continue;
    }
    if (last) {
      if (found->slash && !S_ISDIR(found->status.st_mode)) return fail(ENOTDIR);
      errno = before;
      return finish(found, folder);
    }
    if (!S_ISDIR(found->status.st_mode)) return fail(ENOTDIR);
    if (found->layer == LOWER) remember_folder(found->path);
    folder.upper = found->layer == UPPER;
    folder.lower = folder.lower && (found->layer == LOWER || is_lower_folder(found->path));
    next = following;
  }
  if (finish_folder(found) < 0) return -1;
  errno = before;
  return 0;
}

// The permissions of a private copy of a folder. The other sticky bit tells them from permissions that the script has set.
static mode_t mode_of_copy(mode_t original) { return ((original & 07777) | 0700) ^ S_ISVTX; }

// Gives a folder of both layers the identity of that of the user: programs compare it before and after changes.
void patch_folder(const char* path, struct stat* status) {
  struct stat lower;
  int before = errno;
  if (S_ISDIR(status->st_mode) && status_of(path, &lower) == 0 && S_ISDIR(lower.st_mode)) {
    status->st_dev = lower.st_dev;
    status->st_ino = lower.st_ino;
    status->st_nlink = 1;  // unknown: `find` does not count folders by it
    status->st_uid = lower.st_uid;
    status->st_gid = lower.st_gid;
    if ((status->st_mode & 07777) == mode_of_copy(lower.st_mode)) status->st_mode = lower.st_mode;
  }
  errno = before;
}

// One process at a time changes the private copy. Signals wait, because a handler may remove files too.
lock take_lock(void) {
  char target[PATH_MAX];
  lock held = {-1, 0};
  uint64_t all = ~(uint64_t)0;
  int before = errno;
  KERNEL(SYS_rt_sigprocmask, 0 /* SIG_BLOCK */, &all, &held.signals, sizeof all);
  if (run_file(target, "lock")) held.descriptor = (int)KERNEL(SYS_openat, AT_FDCWD, target, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (held.descriptor >= 0) KERNEL(SYS_flock, held.descriptor, LOCK_EX);
  errno = before;
  set_changed();
  return held;
}

void release(lock held) {
  int before = errno;
  if (held.descriptor >= 0) {
    KERNEL(SYS_flock, held.descriptor, LOCK_UN);  // a child that was forked meanwhile has the descriptor too
    KERNEL(SYS_close, held.descriptor);
  }
  KERNEL(SYS_rt_sigprocmask, 2 /* SIG_SETMASK */, &held.signals, NULL, sizeof held.signals);
  errno = before;
}

int check_access(const char* real, int mode) {
  if (KERNEL(SYS_faccessat2, AT_FDCWD, real, mode, AT_EACCESS) == 0) return 0;
  return errno == ENOSYS || errno == EPERM ? (int)KERNEL(SYS_faccessat, AT_FDCWD, real, mode) : -1;
}

static bool parent_of(const char* path, char* parent) {
  strcpy(parent, path);
  char* slash = strrchr(parent, '/');
  if (slash == NULL) return false;
  if (slash == parent) slash++;
  *slash = '\0';
  return true;
}

// Whether the script has changed the permissions of a folder of both layers. Those of the private copy count then. Otherwise it has
// more permissions than the original, which counts.
bool has_own_mode(const char* path) {
  char real[PATH_MAX];
  struct stat upper, lower;
  int before = errno;
  bool own = upper_path(path, real) && status_of(real, &upper) == 0 && S_ISDIR(upper.st_mode) && status_of(path, &lower) == 0 &&
             (upper.st_mode & 07777) != mode_of_copy(lower.st_mode);
  errno = before;
  return own;
}

// Whether the user may add and remove entries in the folder of the file.
int may_change_folder(const place* found) {
  char parent[PATH_MAX];
  struct stat status;
  if (!found->folder_lower || !parent_of(found->path, parent)) return 0;
  if (is_below(parent, "/proc") || is_below(parent, "/sys")) return fail(EACCES);
  if (has_own_mode(parent)) return 0;
  if (check_access(parent, W_OK | X_OK) < 0) return -1;
  uid_t user = geteuid();
  if (found->layer != LOWER || user == 0 || status_of(parent, &status) < 0 || !(status.st_mode & S_ISVTX)) return 0;
  return status.st_uid == user || found->status.st_uid == user ? 0 : fail(EPERM);
}

// Gives the copy the attributes of the original, as far as the user may do that.
static void copy_attributes(const char* real, const struct stat* original, mode_t mode) {
  struct timespec times[2] = {original->st_atim, original->st_mtim};
  struct stat status;
  int before = errno;
  if (status_of(real, &status) == 0 && (status.st_uid != original->st_uid || status.st_gid != original->st_gid))
    KERNEL(SYS_fchownat, AT_FDCWD, real, original->st_uid, original->st_gid, AT_SYMLINK_NOFOLLOW);
  KERNEL(SYS_fchmodat, AT_FDCWD, real, mode);
  KERNEL(SYS_utimensat, AT_FDCWD, real, times, AT_SYMLINK_NOFOLLOW);
  errno = before;
}

// Makes the folder, and those above it, in the private copy.
int copy_folder(const char* path) {
  char real[PATH_MAX];
  struct stat status;
  int before = errno;
  if (!upper_path(path, real)) return -1;
  if (strcmp(path, "/") == 0) return 0;
  if (status_of(real, &status) == 0) return 0;
  size_t base = strlen(run_folder) + strlen("/upper");
  for (char* end = real + base + 1; end != NULL;) {
    end = strchr(end, '/');
    if (end != NULL) *end = '\0';
    if (KERNEL(SYS_mkdirat, AT_FDCWD, real, 0700) == 0) {
      if (status_of(real + base, &status) == 0) copy_attributes(real, &status, mode_of_copy(status.st_mode));
    } else if (errno != EEXIST) {
      return -1;
    }
    if (end != NULL) *end++ = '/';
  }
  errno = before;
  return 0;
}

static int copy_content(int from, int to) {
  char buffer[8192];
  while (true) {
    ssize_t size = KERNEL(SYS_copy_file_range, from, NULL, to, NULL, 1 << 30, 0);
    if (size < 0) size = KERNEL(SYS_sendfile, to, from, NULL, 1 << 30);
    if (size == 0) break;
    if (size < 0) return -1;
  }
  // some file systems say that a file has no content, although it can be read
  for (ssize_t size; (size = KERNEL(SYS_read, from, buffer, sizeof buffer)) != 0;) {
    if (size < 0 || KERNEL(SYS_write, to, buffer, size) != size) return -1;
  }
  return 0;
}

static int copy_file(const place* found, const char* target, bool with_content) {
  char fresh[PATH_MAX];
  if (snprintf(fresh, sizeof fresh, "%s/copy%ld", run_folder, (long)KERNEL(SYS_gettid)) >= PATH_MAX) return fail(ENAMETOOLONG);
  int to = (int)KERNEL(SYS_openat, AT_FDCWD, fresh, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
  if (to < 0) return -1;
  int status = 0;
  if (with_content) {
    int from = (int)KERNEL(SYS_openat, AT_FDCWD, found->real, O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
    status = from < 0 ? -1 : copy_content(from, to);
    if (from >= 0) KERNEL(SYS_close, from);
  }
  KERNEL(SYS_close, to);
  if (status == 0) {
    copy_attributes(fresh, &found->status, found->status.st_mode & 07777);
    status = (int)KERNEL(SYS_renameat2, AT_FDCWD, fresh, AT_FDCWD, target, 0);
  }
  return status;
}

static int make_mark(const char* kind, const char* text, const char* target) {
  char stored[PATH_MAX];
  if (snprintf(stored, sizeof stored, NOWHERE "%s%s", kind, text) >= PATH_MAX) return fail(ENAMETOOLONG);
  return (int)KERNEL(SYS_symlinkat, stored, AT_FDCWD, target);
}

// Puts a copy of the file of the user into the private copy. Files that are no regular ones, and large ones of which the content is
// not needed now, are redirected there.
int copy_up(place* found, bool with_content) {
  char target[PATH_MAX], text[PATH_MAX], parent[PATH_MAX];
  if (found->layer != LOWER) return 0;
  if (S_ISDIR(found->status.st_mode)) {
    if (copy_folder(found->path) < 0) return -1;
    found->layer = UPPER;
    return upper_path(found->path, found->real) ? 0 : -1;
  }
  if (!upper_path(found->path, target) || !parent_of(found->path, parent) || copy_folder(parent) < 0) return -1;
  int status;
  if (S_ISLNK(found->status.st_mode)) {
    status = read_link(found->real, text) < 0 ? -1 : make_mark("L", text, target);
  } else if (S_ISREG(found->status.st_mode)) {
    if (with_content && found->status.st_size > LARGEST_COPY) return fail(EROFS);
    status = copy_file(found, target, with_content);
  } else {
    return fail(EROFS);
  }
  if (status < 0) return -1;
  strcpy(found->real, target);
  found->layer = UPPER;
  found->redirected = false;
  return 0;
}

// Makes sure that an entry can be made with the name of a missing or removed file.
int make_name_free(place* found) {
  char parent[PATH_MAX];
  if (may_change_folder(found) < 0) return -1;
  if (!parent_of(found->path, parent) || copy_folder(parent) < 0) return -1;
  return found->removed ? (int)KERNEL(SYS_unlinkat, AT_FDCWD, found->real, 0) : 0;
}

// Notes that the file of the user is removed, if there is one.
int hide_lower(const place* found) {
  char target[PATH_MAX], parent[PATH_MAX];
  struct stat status;
  int before = errno;
  if (!found->folder_lower || status_of(found->path, &status) < 0) {
    errno = before;
    return 0;
  }
  if (!upper_path(found->path, target) || !parent_of(found->path, parent) || copy_folder(parent) < 0) return -1;
  return make_mark("", "", target);
}

// Calls the function for each entry of an open folder.
void each_entry(int descriptor, entry_function function, void* data) {
  struct entry {
    uint64_t number;
    int64_t offset;
    unsigned short length;
    unsigned char kind;
    char name[];
  };
  char buffer[4096] __attribute__((aligned(8)));
  for (long size; (size = KERNEL(SYS_getdents64, descriptor, buffer, sizeof buffer)) > 0;) {
    for (long position = 0; position < size;) {
      const struct entry* each = (const struct entry*)(buffer + position);
      position += each->length;
      if (strcmp(each->name, ".") == 0 || strcmp(each->name, "..") == 0) continue;
      if (!function(descriptor, each->name, data)) return;
    }
  }
}

static void walk_folder(const char* real, entry_function function, void* data) {
  int before = errno;
  int descriptor = (int)KERNEL(SYS_openat, AT_FDCWD, real, O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);
  if (descriptor >= 0) {
    each_entry(descriptor, function, data);
    KERNEL(SYS_close, descriptor);
  }
  errno = before;
}

static bool hide_entry(int descriptor, const char* name, void* data) {
  (void)descriptor;
  KERNEL(SYS_symlinkat, NOWHERE, *(int*)data, name);  // fails for names that the new folder has
  return true;
}

// The folder `target` of the private copy replaces the removed folder `path` of the user: its files must not appear again.
int hide_lower_entries(const char* path, const char* target) {
  if (!is_lower_folder(path)) return 0;
  int descriptor = (int)KERNEL(SYS_openat, AT_FDCWD, target, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (descriptor < 0) return -1;
  walk_folder(path, hide_entry, &descriptor);
  KERNEL(SYS_close, descriptor);
  return 0;
}

static bool is_mark(int folder, const char* name) {
  char text[16];
  ssize_t size = KERNEL(SYS_readlinkat, folder, name, text, sizeof text);
  return size == sizeof NOWHERE - 1 && memcmp(text, NOWHERE, sizeof NOWHERE - 1) == 0;
}

static bool notice_entry(int descriptor, const char* name, void* data) {
  if (is_mark(descriptor, name)) return true;
  *(bool*)data = false;
  return false;
}

typedef struct {
  int upper;
  bool empty;
} search;

static bool notice_lower_entry(int descriptor, const char* name, void* data) {
  search* state = data;
  struct stat status;
  (void)descriptor;
  if (state->upper >= 0 && KERNEL(SYS_newfstatat, state->upper, name, &status, AT_SYMLINK_NOFOLLOW) == 0) return true;
  state->empty = false;
  return false;
}

// Whether a folder has no entries in either layer.
int is_empty(const place* found) {
  bool empty = true;
  int before = errno;
  if (found->layer == UPPER) walk_folder(found->real, notice_entry, &empty);
  if (empty && (found->layer == LOWER || found->merged)) {
    search state = {-1, true};
    if (found->merged) state.upper = (int)KERNEL(SYS_openat, AT_FDCWD, found->real, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    walk_folder(found->path, notice_lower_entry, &state);
    if (state.upper >= 0) KERNEL(SYS_close, state.upper);
    empty = state.empty;
  }
  errno = before;
  return empty;
}

static bool remove_mark(int descriptor, const char* name, void* data) {
  (void)data;
  if (is_mark(descriptor, name)) KERNEL(SYS_unlinkat, descriptor, name, 0);
  return true;
}

void remove_marks(const char* real) { walk_folder(real, remove_mark, NULL); }
