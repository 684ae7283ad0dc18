// Listings of folders: the entries of both layers, without removed ones and without the folder of the run, which a script that
// removes everything in /tmp must not see.

#include "common.h"
#include <dirent.h>
#include <glob.h>
#include <pthread.h>

typedef struct listing {
  struct listing* next;
  DIR* opened;  // what the program has
  DIR* other;   // the same folder in the other layer; NULL if it is in one layer
  bool opened_is_upper;
  bool at_other;
  char path[];
} listing;

static listing* listings;
static int count;
static pthread_mutex_t access_lock = PTHREAD_MUTEX_INITIALIZER;

static listing* listing_of(DIR* opened) {
  if (__atomic_load_n(&count, __ATOMIC_ACQUIRE) == 0) return NULL;
  pthread_mutex_lock(&access_lock);
  listing* each = listings;
  while (each != NULL && each->opened != opened) each = each->next;
  pthread_mutex_unlock(&access_lock);
  return each;
}

static listing* take_listing(DIR* opened) {
  if (__atomic_load_n(&count, __ATOMIC_ACQUIRE) == 0) return NULL;
  pthread_mutex_lock(&access_lock);
  listing** each = &listings;
  while (*each != NULL && (*each)->opened != opened) each = &(*each)->next;
  listing* found = *each;
  if (found != NULL) {
    *each = found->next;
    __atomic_sub_fetch(&count, 1, __ATOMIC_RELEASE);
  }
  pthread_mutex_unlock(&access_lock);
  return found;
}

static DIR* open_real(const char* real) {
  int descriptor = (int)KERNEL(SYS_openat, AT_FDCWD, real, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (descriptor < 0) return NULL;
  DIR* opened = NEXT(fdopendir)(descriptor);
  if (opened == NULL) KERNEL(SYS_close, descriptor);
  return opened;
}

static bool holds_run(const char* path) {
  size_t length = strlen(path);
  if (length == 1) length = 0;
  return strncmp(run_folder, path, length) == 0 && run_folder[length] == '/' && strchr(run_folder + length + 1, '/') == NULL;
}

// Remembers that the entries of an open folder are not all, or not only, those to be listed.
static void add_listing(DIR* opened) {
  char given[PATH_MAX], link[64];
  int before = errno;
  snprintf(link, sizeof link, "/proc/self/fd/%d", dirfd(opened));
  if (read_link(link, given) < 0) return;
  place found;
  bool is_upper = is_below(given, run_folder);
  if (resolve(AT_FDCWD, given, true, &found) < 0 || (found.layer != UPPER && found.layer != LOWER)) {
    errno = before;
    return;
  }
  if (found.layer == LOWER && !holds_run(found.path)) return;
  size_t length = strlen(found.path) + 1;
  listing* fresh = malloc(sizeof *fresh + length);
  if (fresh == NULL) return;
  *fresh = (listing){.opened = opened, .opened_is_upper = is_upper};
  memcpy(fresh->path, found.path, length);
  if (is_upper && found.merged) fresh->other = open_real(found.path);
  if (!is_upper && found.layer == UPPER) fresh->other = open_real(found.real);
  pthread_mutex_lock(&access_lock);
  fresh->next = listings;
  listings = fresh;
  __atomic_add_fetch(&count, 1, __ATOMIC_RELEASE);
  pthread_mutex_unlock(&access_lock);
  errno = before;
}

static bool is_shown(const listing* from, DIR* layer, bool is_upper, const struct dirent* entry) {
  char path[PATH_MAX], real[PATH_MAX], text[PATH_MAX];
  struct stat status;
  bool shown = true;
  int before = errno;
  if (is_upper) {
    if (entry->d_type != DT_LNK && entry->d_type != DT_UNKNOWN) return true;
    ssize_t size = KERNEL(SYS_readlinkat, dirfd(layer), entry->d_name, text, sizeof text - 1);
    if (size >= 0) {
      text[size] = '\0';
      shown = link_target(text) != NULL;
    }
  } else if (snprintf(path, sizeof path, "%s/%s", from->path[1] == '\0' ? "" : from->path, entry->d_name) < PATH_MAX) {
    if (strcmp(path, run_folder) == 0) shown = false;
    if (shown && strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0 && upper_path(path, real))
      shown = KERNEL(SYS_newfstatat, AT_FDCWD, real, &status, AT_SYMLINK_NOFOLLOW) < 0;
  }
  errno = before;
  return shown;
}

static bool is_redirected(DIR* layer, const struct dirent* entry) {
  char text[16];
  return KERNEL(SYS_readlinkat, dirfd(layer), entry->d_name, text, sizeof text) > 10 && text[10] == 'R' &&
         memcmp(text, "/dev/null/", 10) == 0;
}

static struct dirent* next_entry(listing* from) {
  while (true) {
    DIR* layer = from->at_other ? from->other : from->opened;
    bool is_upper = from->at_other ? !from->opened_is_upper : from->opened_is_upper;
    int before = errno;
    errno = 0;
    struct dirent* entry = NEXT(readdir)(layer);
    int error = errno;
    errno = before;
    if (entry == NULL) {
      if (error != 0) {
        errno = error;
        return NULL;
      }
      if (from->at_other || from->other == NULL) return NULL;
      from->at_other = true;
      continue;
    }
    bool is_dots = strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0;
    if (from->at_other && is_dots) continue;
    if (!is_shown(from, layer, is_upper, entry)) continue;
    if (is_upper && entry->d_type == DT_LNK && is_redirected(layer, entry)) entry->d_type = DT_UNKNOWN;
    return entry;
  }
}

#pragma GCC visibility push(default)

DIR* opendir(const char* path) {
  if (!protects) return NEXT(opendir)(path);
  if (path != NULL && *path == '\0') {
    errno = ENOENT;
    return NULL;
  }
  int descriptor = overlay_open(AT_FDCWD, path, O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NONBLOCK, 0);
  if (descriptor < 0) return NULL;
  DIR* opened = NEXT(fdopendir)(descriptor);
  if (opened == NULL)
    KERNEL(SYS_close, descriptor);
  else
    add_listing(opened);
  return opened;
}

DIR* fdopendir(int descriptor) {
  DIR* opened = NEXT(fdopendir)(descriptor);
  if (opened != NULL && protects) add_listing(opened);
  return opened;
}

struct dirent* readdir(DIR* opened) {
  listing* found = listing_of(opened);
  return found == NULL ? NEXT(readdir)(opened) : next_entry(found);
}
struct dirent64* readdir64(DIR* opened) { return (struct dirent64*)readdir(opened); }

#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
int readdir_r(DIR* opened, struct dirent* entry, struct dirent** result) {
  listing* found = listing_of(opened);
  if (found == NULL) return NEXT(readdir_r)(opened, entry, result);
  struct dirent* next = next_entry(found);
  if (next != NULL) memcpy(entry, next, next->d_reclen);
  *result = next == NULL ? NULL : entry;
  return 0;
}
int readdir64_r(DIR* opened, struct dirent64* entry, struct dirent64** result) {
  return readdir_r(opened, (struct dirent*)entry, (struct dirent**)result);
}

void rewinddir(DIR* opened) {
  listing* found = listing_of(opened);
  NEXT(rewinddir)(opened);
  if (found == NULL) return;
  found->at_other = false;
  if (found->other != NULL) NEXT(rewinddir)(found->other);
}

int closedir(DIR* opened) {
  listing* found = take_listing(opened);
  if (found != NULL && found->other != NULL) NEXT(closedir)(found->other);
  free(found);
  return NEXT(closedir)(opened);
}

typedef int (*filter_function)(const struct dirent*);
typedef int (*compare_function)(const struct dirent**, const struct dirent**);

int scandirat(int at, const char* path, struct dirent*** names, filter_function filter, compare_function compare) {
  if (!protects) return NEXT(scandirat)(at, path, names, filter, compare);
  int descriptor = overlay_open(at, path, O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NONBLOCK, 0);
  if (descriptor < 0) return -1;
  DIR* opened = fdopendir(descriptor);
  if (opened == NULL) {
    KERNEL(SYS_close, descriptor);
    return -1;
  }
  size_t used = 0, room = 16;
  struct dirent** found = malloc(room * sizeof *found);
  for (struct dirent* entry; found != NULL && (entry = readdir(opened)) != NULL;) {
    if (filter != NULL && !filter(entry)) continue;
    if (used == room) found = realloc(found, (room *= 2) * sizeof *found);
    if (found == NULL || (found[used] = malloc(entry->d_reclen)) == NULL) break;
    memcpy(found[used++], entry, entry->d_reclen);
  }
  closedir(opened);
  if (found == NULL) return fail(ENOMEM);
  if (compare != NULL) qsort(found, used, sizeof *found, (int (*)(const void*, const void*))compare);
  *names = found;
  return (int)used;
}
int scandir(const char* path, struct dirent*** names, filter_function filter, compare_function compare) {
  return scandirat(AT_FDCWD, path, names, filter, compare);
}
int scandir64(const char* path, struct dirent64*** names, int (*filter)(const struct dirent64*),
              int (*compare)(const struct dirent64**, const struct dirent64**)) {
  return scandirat(AT_FDCWD, path, (struct dirent***)names, (filter_function)filter, (compare_function)compare);
}

// The C library calls its own functions in glob, unless it is given others.
static void give_functions(glob_t* result, int* flags) {
  if (!protects || *flags & GLOB_ALTDIRFUNC) return;
  *flags |= GLOB_ALTDIRFUNC;
  result->gl_opendir = (void* (*)(const char*))opendir;
  result->gl_readdir = (struct dirent * (*)(void*)) readdir;
  result->gl_closedir = (void (*)(void*))(uintptr_t)closedir;
  result->gl_stat = stat;
  result->gl_lstat = lstat;
}
int glob(const char* pattern, int flags, int (*error)(const char*, int), glob_t* result) {
  give_functions(result, &flags);
  return NEXT(glob)(pattern, flags, error, result);
}
int glob64(const char* pattern, int flags, int (*error)(const char*, int), glob64_t* result) {
  give_functions((glob_t*)result, &flags);
  return NEXT(glob64)(pattern, flags, error, result);
}
