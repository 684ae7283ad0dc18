// What the files of the preloaded library share. Names in it are hidden: a program may have functions of the same names.

#pragma once

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

extern char** environ;

#pragma GCC visibility push(hidden)

extern char run_folder[PATH_MAX];  // of the run; empty without a run
extern char own_library[PATH_MAX];
extern bool protects;  // whether files, processes and the network are protected

// Where the kernel finds a file.
enum layer {
  MISSING,
  LOWER,  // the file of the user
  UPPER,  // the private copy
  OWN,    // below the folder of the run
  MAGIC,  // a link in /proc that only the kernel can follow
};

typedef struct {
  char path[PATH_MAX];  // absolute, without links in its folders
  char real[PATH_MAX];  // where the kernel finds the file, or where it is to be made
  struct stat status;   // of the file itself, or of its target for MAGIC
  enum layer layer;
  bool merged;        // a folder that is in both layers
  bool redirected;    // an entry of the private copy that stands for a file of the user with another name
  bool removed;       // the file of the user was removed
  bool folder_lower;  // whether the folder of the file is one of the user
  bool slash;         // whether a slash follows the name
} place;

// Calls the kernel, so that neither this library nor the C library interferes. Sets errno only on failure.
long call_kernel(long number, long a, long b, long c, long d, long e, long f);
#define KERNEL_7(number, a, b, c, d, e, f, ...) \
  call_kernel(number, (long)(a), (long)(b), (long)(c), (long)(d), (long)(e), (long)(f))
#define KERNEL(...) KERNEL_7(__VA_ARGS__, 0, 0, 0, 0, 0, 0, 0)

// The next function of this name, which is that of the C library.
void* next_function(const char* name);
#define NEXT(name)                                                               \
  ({                                                                             \
    static __typeof(&name) found;                                                \
    if (found == NULL) found = (__typeof(&name))(uintptr_t)next_function(#name); \
    found;                                                                       \
  })

// On 64-bit machines the functions for large files are the same.
#define ALIAS(alias_name, name) extern __typeof(name) alias_name __attribute__((alias(#name), visibility("default")))

int fail(int error);                                       // sets errno, and returns -1
bool is_below(const char* path, const char* folder_path);  // also for the folder itself
bool run_file(char* target, const char* name);             // the path of a file of the run
void note(const char* kind, const char* name);             // makes the empty file KIND/NAME of the run
bool is_noted(const char* kind, const char* name);

// overlay.c
bool has_changes(void);  // whether the script has changed any file
void set_changed(void);
int resolve(int at, const char* given, bool follow, place* found);
bool path_of_descriptor(int descriptor, char* path);  // as the script knows it
bool is_foreign(int descriptor);                      // of a file of the user
void strip_private(char* path);                       // removes the folder of the private copy from the beginning
ssize_t read_link(const char* real, char* text);      // the text as it is stored, with a zero at the end
const char* link_target(const char* text);            // what the stored text means; NULL for a removed file
void patch_folder(const char* path, struct stat* status);
bool upper_path(const char* path, char* real);
int copy_up(place* found, bool with_content);
int copy_folder(const char* path);
bool has_own_mode(const char* path);
int may_change_folder(const place* found);
int check_access(const char* real, int mode);
int make_name_free(place* found);
int hide_lower(const place* found);
int hide_lower_entries(const char* path, const char* target);
int is_empty(const place* found);
void remove_marks(const char* real);
typedef struct {
  int descriptor;
  uint64_t signals;
} lock;
lock take_lock(void);
void release(lock held);
typedef bool (*entry_function)(int descriptor, const char* name, void* data);  // false ends the walk
void each_entry(int descriptor, entry_function function, void* data);

// files.c
int overlay_open(int at, const char* given, int flags, mode_t mode);
int overlay_unlink(int at, const char* given, int flags);

// processes.c
bool is_of_run(pid_t process);

#pragma GCC visibility pop
